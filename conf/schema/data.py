"""Types and defaults of the `data=` options: a wrong key or type is an error before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore


class Vocabulary(str, Enum):
    gpt2 = "gpt2"
    words = "words"


@dataclass
class Language:
    """What every data set of text takes."""

    seq_len: int = 256  # tokens per sample
    cache_dir: str | None = None  # where tokens and downloads are kept; null: the user's cache folder
    num_workers: int = 0  # processes that read ahead; 0: one thread
    vocabulary: Vocabulary = "${oc.select:model.vocabulary,gpt2}"  # the model's choice, else GPT-2's tokens
    min_frequency: int | None = None  # rarer words become <unk>; null: 5 (wikitext2: 1, as published)
    max_vocabulary: int | None = None  # words at most, <unk> included
    batchify: bool = False  # train on the text in order, in columns that are read side by side
    columns: int = "${train.global_batch_size}"  # with batchify; no other number fits
    extra_tokens: Any = "${oc.select:model.extra_tokens,null}"  # behind GPT-2's own tokens; the model's


@dataclass
class Stdlib(Language):
    _target_: str = "data.stdlib.Stdlib"


@dataclass
class Text(Language):
    _target_: str = "data.text.Text"
    root: str | None = None  # the file or folder of text; it must be given


@dataclass
class WikiText2(Language):
    _target_: str = "data.wikitext2.WikiText2"
    root: str | None = None  # a folder with train.txt, valid.txt and test.txt; null: download


class TokenFormat(str, Enum):
    auto = "auto"
    llmc = "llmc"
    nanogpt = "nanogpt"


@dataclass
class Tokens:
    _target_: str = "data.tokens.Tokens"
    root: str | None = None  # the .bin file or the folder of such files; it must be given
    seq_len: int = 256  # tokens per sample
    format: TokenFormat = TokenFormat.auto  # llmc: with a header; nanogpt: without; auto: llmc, by its header
    vocab_size: int = 50257  # tokens are below it; 50257: GPT-2's
    cache_dir: str | None = None  # where it is noted that files have been checked; null: the user's cache folder
    num_workers: int = 0  # processes that read ahead; 0: one thread
    extra_tokens: Any = "${oc.select:model.extra_tokens,null}"  # behind GPT-2's own tokens; the model's


@dataclass
class RandomRegression:
    _target_: str = "data.random_regression.RandomRegression"
    samples: int = 10_000  # to train on; a tenth as many each to validate and to test
    in_features: int = 10
    out_features: int = 5
    noise: float = 0.1  # standard deviation; the best mean squared error is its square
    seed: int = "${seed}"  # of the teacher and the samples; the run's seed
    num_workers: int = 0  # processes that read ahead; 0: one thread
    cache_dir: str | None = None  # not used: nothing is written


@dataclass
class Jsonl:
    _target_: str = "data.jsonl.Jsonl"
    root: str | None = None  # the file or the folder of *.jsonl files; it must be given
    field: Any = "text"  # the name of the text in a row, or a list of names whose texts are joined by newlines
    seq_len: int = 256  # tokens per row; longer rows are cut, shorter ones padded
    bucket_by_length: bool = False  # true: training batches of similar length, padded to few widths
    cache_dir: str | None = None  # where the index is kept; null: the user's cache folder
    num_workers: int = 0  # processes that read ahead; 0: one thread
    extra_tokens: Any = "${oc.select:model.extra_tokens,null}"  # behind GPT-2's own tokens; the model's


@dataclass
class Image:
    """What every data set of images takes; by default, images that fit the model."""

    image_size: int = "${oc.select:model.image_size,28}"  # pixels a side
    channels: int = "${oc.select:model.in_channels,1}"  # 1: grey; 3: colours
    num_classes: int = "${oc.select:model.num_classes,10}"  # labels from 0 on; others are an error
    cache_dir: str | None = None  # where downloads are kept; null: the user's cache folder
    num_workers: int = 0  # processes that read ahead; 0: one thread


@dataclass
class RandomImages(Image):
    _target_: str = "data.random_images.RandomImages"
    samples: int = 480  # to train on; a tenth as many each to validate and to test
    image_size: int = "${oc.select:model.image_size,128}"
    channels: int = "${oc.select:model.in_channels,3}"
    num_classes: int = "${oc.select:model.num_classes,1000}"
    seed: int = "${seed}"  # of images and classes; the run's seed


@dataclass
class Digits(Image):
    _target_: str = "data.digits.Digits"


@dataclass
class MNIST(Image):
    _target_: str = "data.mnist.MNIST"
    root: str | None = None  # the folder of the four published files, or one that holds it; null: download


@dataclass
class CIFAR10(Image):
    _target_: str = "data.cifar10.CIFAR10"
    root: str | None = None  # cifar-10-batches-py, or the folder that holds it; null: download
    augment: bool = True  # train on random cuts with a margin of 4 pixels and mirror images
    image_size: int = "${oc.select:model.image_size,32}"
    channels: int = "${oc.select:model.in_channels,3}"
    seed: int = "${seed}"  # of the augmentation; the run's seed


def register(store: ConfigStore) -> None:
    """Stores each option as schema/data/NAME, from where conf/data/NAME.yaml pulls it in."""
    options = {
        "stdlib": Stdlib,
        "text": Text,
        "wikitext2": WikiText2,
        "tokens": Tokens,
        "random_regression": RandomRegression,
        "jsonl": Jsonl,
        "random_images": RandomImages,
        "digits": Digits,
        "mnist": MNIST,
        "cifar10": CIFAR10,
    }
    for name, node in options.items():
        store.store(group="schema/data", name=name, node=node)
