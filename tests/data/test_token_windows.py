"""Tokens on disk, and the samples cut from them: one after the other, or from columns read side by side."""

import numpy as np
import pytest

from common.errors import DataError
from data.cache import MappedFile
from data.loader import TrainBatches
from data.text import Text
from data.token_windows import ColumnWindows, TokenWindows, cached_tokens


@pytest.fixture
def held(tmp_path):
    """Writes tokens to a file and maps it."""

    def write(tokens) -> MappedFile:
        np.asarray(tokens, dtype=np.uint16).tofile(tmp_path / "train.uint16")
        return MappedFile(tmp_path / "train.uint16", "uint16")

    return write


@pytest.mark.parametrize("vocab_size, dtype", [(50257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_the_file_is_as_wide_as_the_vocabulary_needs(cache, vocab_size, dtype):
    top = np.array([0, vocab_size - 1])
    files = cached_tokens(cache, "key", lambda _: (vocab_size, {"train": [top, top]}))
    assert files["train"].path.name == f"train.{dtype}"
    inputs, _ = TokenWindows(files["train"], 3).read(np.array([0]), epoch=0)
    assert inputs.tolist() == [[0, vocab_size - 1, 0]]


@pytest.mark.parametrize("tokens, columns, seq_len", [(2000, 20, 7), (145, 4, 35), (144, 4, 35)])
def test_columns_are_the_published_batchify(held, tokens, columns, seq_len):
    """Written as in the tutorial: cut, reshape, walk in steps of bptt; its last window may be short, ours is not."""
    data = np.arange(tokens)
    source = ColumnWindows(held(data), columns, seq_len)
    length = tokens // columns
    published = data[: length * columns].reshape(columns, length).T
    starts = [i for i in range(0, length - 1, seq_len) if i + seq_len <= length - 1]
    assert len(source) == len(starts) * columns
    for window, i in enumerate(starts):
        inputs, targets = source.read(window * columns + np.arange(columns), 0)
        assert np.array_equal(inputs, published[i : i + seq_len].T)
        assert np.array_equal(targets, published[i + 1 : i + 1 + seq_len].T)


def test_training_continues_each_column_from_step_to_step_and_the_replicas_share_the_columns(held):
    source = ColumnWindows(held(range(40)), columns=4, seq_len=3)
    batches = TrainBatches(source, 4, seed=1)
    assert batches.steps_per_epoch == 3
    first = [batches[step].inputs[:, 0].tolist() for step in (1, 2, 3, 4)]
    assert first == [[0, 10, 20, 30], [3, 13, 23, 33], [6, 16, 26, 36], [0, 10, 20, 30]]
    shares = [TrainBatches(source, 4, 1, rank, 2)[2].inputs[:, 0].tolist() for rank in (0, 1)]
    assert shares == [[3, 13], [23, 33]]


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda file: ColumnWindows(file, 4, 10), r"10 in each of data.columns=4.*seq_len=10 needs 11"),
        (lambda file: ColumnWindows(file, 0, 10), "data.columns=0"),
        (lambda file: TrainBatches(ColumnWindows(file, 4, 3), 2, seed=1), "data.columns=4 .*train.global_batch_size=2"),
    ],
)
def test_numbers_that_do_not_fit_are_errors_that_state_them(held, build, message):
    with pytest.raises(DataError, match=message):
        build(held(range(40)))


def test_only_training_goes_by_columns(tmp_path, prepared):
    (tmp_path / "text").write_text("one two three\n" * 2000)
    data = prepared(Text, tmp_path / "text", seq_len=8, vocabulary="words", batchify=True, columns=5)
    assert data.train.ordered and data.train.columns == 5 and "in 5 columns" in data.description
    assert type(data.valid) is TokenWindows and not data.valid.ordered and len(data.valid) == (300 - 1) // 8
