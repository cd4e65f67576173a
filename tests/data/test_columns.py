"""A text read in order, in columns."""

import pickle

import numpy as np
import pytest

from common.errors import DataError
from data.loader import TrainBatches
from data.text import Text
from data.token_windows import ColumnWindows, TokenWindows, cached_tokens


def test_a_sample_is_a_window_of_a_column_and_its_targets_the_tokens_that_follow():
    source = ColumnWindows(np.arange(23, dtype=np.uint16), columns=3, seq_len=2)
    assert len(source) == 9  # columns of 7 tokens, three windows each
    inputs, targets = source.read(np.arange(6), epoch=0)
    assert inputs.tolist() == [[0, 1], [7, 8], [14, 15], [2, 3], [9, 10], [16, 17]]
    assert targets.tolist() == [[1, 2], [8, 9], [15, 16], [3, 4], [10, 11], [17, 18]]


@pytest.mark.parametrize("tokens, columns, seq_len", [(2000, 4, 35), (2000, 20, 7), (145, 4, 35), (144, 4, 35)])
def test_columns_are_the_published_batchify(tokens, columns, seq_len):
    """Written as in the tutorial: cut, reshape, walk in steps of bptt; its last window may be short, ours is not."""
    data = np.arange(tokens)
    source = ColumnWindows(data, columns, seq_len)
    length = tokens // columns
    published = data[: length * columns].reshape(columns, length).T
    starts = [i for i in range(0, length - 1, seq_len) if i + seq_len <= length - 1]
    assert len(source) == len(starts) * columns
    for window, i in enumerate(starts):
        inputs, targets = source.read(window * columns + np.arange(columns), 0)
        assert np.array_equal(inputs, published[i : i + seq_len].T)
        assert np.array_equal(targets, published[i + 1 : i + 1 + seq_len].T)


def test_training_reads_each_column_on_from_step_to_step_in_every_epoch():
    source = ColumnWindows(np.arange(40), columns=4, seq_len=3)
    batches = TrainBatches(source, 4, seed=1)
    assert batches.steps_per_epoch == 3
    assert [batches[step].inputs[:, 0].tolist() for step in (1, 2, 3, 4)] == [
        [0, 10, 20, 30],
        [3, 13, 23, 33],
        [6, 16, 26, 36],
        [0, 10, 20, 30],
    ]


def test_the_replicas_share_the_columns():
    source = ColumnWindows(np.arange(40), columns=4, seq_len=3)
    shares = [TrainBatches(source, 4, 1, rank, 2)[2].inputs[:, 0].tolist() for rank in (0, 1)]
    assert shares == [[3, 13], [23, 33]]


def test_another_global_batch_than_the_columns_is_an_error_with_both_numbers():
    source = ColumnWindows(np.arange(40), columns=4, seq_len=3)
    with pytest.raises(DataError, match="data.columns=4 .*train.global_batch_size=2"):
        TrainBatches(source, 2, seed=1)


@pytest.mark.parametrize(
    "columns, message", [(4, r"10 in each of data.columns=4.*seq_len=10 needs 11"), (0, "data.columns=0")]
)
def test_columns_that_hold_no_sample_are_an_error_with_the_numbers(columns, message):
    with pytest.raises(DataError, match=message):
        ColumnWindows(np.arange(40), columns, seq_len=10)


def test_a_started_process_gets_the_path_and_not_the_tokens(tmp_path):
    files = cached_tokens(tmp_path, "key", lambda _: (50257, {"train": [np.arange(50_000)]}))
    sent = pickle.dumps(ColumnWindows(files["train"], 10, 100))
    assert len(sent) < 1000
    assert pickle.loads(sent).read(np.array([13]), 0)[0][0, 0] == 15_100


def test_only_training_goes_by_columns(tmp_path):
    (tmp_path / "text").write_text("one two three\n" * 2000)
    data = Text(str(tmp_path / "text"), 8, str(tmp_path / "cache"), vocabulary="words", batchify=True, columns=5)
    data.prepare()
    assert data.train.ordered and data.train.columns == 5 and "in 5 columns" in data.description
    assert type(data.valid) is TokenWindows and not data.valid.ordered and len(data.valid) == (300 - 1) // 8
