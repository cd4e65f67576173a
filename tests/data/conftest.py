"""What the tests of the data sets share."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from file_formats import idx

from data.prompts import RowTokens
from data.vocabulary import GPT2Vocabulary

# Data that is not part of the repository.
PUBLISHED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def prepared(cache):
    """Builds a data set, with a cache of the test's own, and prepares it."""

    def build(kind, root=None, **options):
        if root is not None:
            options["root"] = str(root)
        data = kind(cache_dir=str(cache), **options)
        data.prepare()
        return data

    return build


@pytest.fixture
def published():
    """Where a published data set lies beside the repository; skips the test where it does not."""

    def find(name: str) -> Path:
        if not (PUBLISHED / name).is_dir():
            pytest.skip(f"needs the published {name} (docs/data.md), which this repository does not contain")
        return PUBLISHED / name

    return find


@pytest.fixture
def theirs():
    """``theirs(folder)``: transformers' tokenizer of a folder; skips the test where there is no transformers."""
    transformers = pytest.importorskip("transformers", reason="a test dependency (requirements-dev.txt)")
    return transformers.AutoTokenizer.from_pretrained


@pytest.fixture
def everywhere():
    """``everywhere(right)``: ``right(seed)`` holds in a forked process and in threads of this one, all at once."""

    def check(right) -> None:
        if (child := os.fork()) == 0:
            wrong = True
            try:
                wrong = not right(9)
            finally:
                os._exit(wrong)
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(right, range(4)))
        assert os.waitpid(child, 0)[1] == 0

    return check


@pytest.fixture
def mnist_files(tmp_path) -> Path:
    """MNIST's four files, with 120 and 20 images."""
    random = np.random.default_rng(0)
    raw = tmp_path / "files" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, n in (("train", 120), ("t10k", 20)):
        images = random.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(idx(np.arange(n, dtype=np.uint8) % 10))
    return raw


@pytest.fixture
def texts_of():
    """``texts_of(rows, indices, fields)``: the texts of some rows."""

    def read(rows, indices=None, fields=("text",)):
        indices = np.arange(len(rows)) if indices is None else np.array(indices, dtype=np.int64)
        return [text for (text,) in rows.read(indices, RowTokens(GPT2Vocabulary(), fields))]

    return read
