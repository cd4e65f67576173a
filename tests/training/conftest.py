"""What the tests of training share: a small text, and runs of the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # ``commandline``, ``composed``; here and in ranks


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> list[str]:
    """Overrides for a text of 100 kB, read in milliseconds: samples of 32 tokens."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(Path(argparse.__file__).read_text())
    return ["data=text", f"data.root={folder}/text.txt", f"data.cache_dir={folder}/cache", "data.seq_len=32"]


@pytest.fixture(scope="session")
def cli(tmp_path_factory, text):
    """``cli("parallel=pipe_ddp", …)``: one run per layout, in which many tests look.

    Five steps of SGD on the tiny GPT-2, eight micro-batches of two sequences in every layout.
    """
    from commandline import train

    recipe = [
        "model=gpt2",
        "model.size=tiny",
        "model.dropout=0.1",
        *text,
        "train.steps=5",
        "train.global_batch_size=16",
        "train.precision=fp32",
        "train.grad_clip=0.5",
        "train.eval_every=2",
        "train.eval_batches=1",
        "optim=sgd",
        "scheduler=constant",
    ]
    runs = {}

    def get(*layout: str, **options):
        if layout not in runs:
            folder = tmp_path_factory.mktemp("cli") / "run"
            run = train([*recipe, *layout], folder, **options)
            assert run.code == 0, run.console
            runs[layout] = run
        return runs[layout]

    get.recipe = recipe
    return get


@pytest.fixture
def deterministic_again():
    """Undoes what train.deterministic sets for the whole process."""
    import torch

    yield
    torch.use_deterministic_algorithms(False)
