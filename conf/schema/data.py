"""Types and defaults of the `data=` options: a wrong key or type is an error before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore


@dataclass
class Stdlib:
    _target_: str = "data.text.Stdlib"
    seq_len: int = 256  # tokens per sample
    cache_dir: str | None = None  # where the tokens are kept; null: the user's cache folder
    num_workers: int = 0  # processes that read ahead; 0: one thread


@dataclass
class Text:
    _target_: str = "data.text.Text"
    root: str | None = None  # the file or folder of text; it must be given
    seq_len: int = 256  # tokens per sample
    cache_dir: str | None = None  # where the tokens are kept; null: the user's cache folder
    num_workers: int = 0  # processes that read ahead; 0: one thread


@dataclass
class WikiText2:
    _target_: str = "data.wikitext2.WikiText2"
    root: str | None = None  # a folder with train.txt, valid.txt and test.txt; null: download
    seq_len: int = 256  # tokens per sample
    cache_dir: str | None = None  # where tokens and downloads are kept; null: the user's cache folder
    num_workers: int = 0  # processes that read ahead; 0: one thread


@dataclass
class RandomRegression:
    _target_: str = "data.regression.RandomRegression"
    samples: int = 10_000  # to train on; a tenth as many each to validate and to test
    in_features: int = 10
    out_features: int = 5
    noise: float = 0.1  # standard deviation; the best mean squared error is its square
    seed: int = "${seed}"  # of the teacher and the samples; the run's seed
    num_workers: int = 0  # processes that read ahead; 0: one thread
    cache_dir: str | None = None  # not used: nothing is written


def register(store: ConfigStore) -> None:
    """Stores each option as schema/data/NAME, from where conf/data/NAME.yaml pulls it in."""
    options = {"stdlib": Stdlib, "text": Text, "wikitext2": WikiText2, "random_regression": RandomRegression}
    for name, node in options.items():
        store.store(group="schema/data", name=name, node=node)
