"""Tensors in memory: which rows are held out, and splits of one's own."""

import pytest
import torch

from common.errors import DataError
from data.tensors import TensorData

X, Y = torch.randn(20, 3), torch.arange(20)


def test_the_rows_of_each_split_are_known():
    data = TensorData(X, Y, valid=0.2)
    assert sorted(torch.cat([*data.rows.values()]).tolist()) == Y.tolist()
    for split, size in {"train": 14, "valid": 4, "test": 2}.items():
        rows = data.rows[split]
        assert len(rows) == size and torch.equal(getattr(data, split).inputs, X[rows])
    assert data.description == "tensors: train 14 samples, valid 4 (0.2 of all), test 2 (0.1 of all)"


def test_a_split_of_ones_own_takes_no_row_and_is_part_of_what_is_compared_between_ranks():
    data = TensorData(X, Y, valid=0.0, test=(X[:5] + 1, Y[:5].int()))
    assert (len(data.train), data.valid, len(data.test)) == (20, None, 5)
    assert torch.equal(data.test.inputs, X[:5] + 1) and data.test.targets.dtype == torch.int64
    assert data.description == "tensors: train 20 samples, valid 0 (0 of all), test 5 (as given)"
    assert data.fingerprint != TensorData(X, Y, valid=0.0, test=(X[:5], Y[:5])).fingerprint
    with pytest.raises(DataError, match=r"rows of test are torch.float32 \[2\], .*train on torch.float32 \[3\]"):
        TensorData(X, Y, test=(X[:, :2], Y))
    with pytest.raises(DataError, match="valid=0.6 and test=0.4 must be 0 or more, and less than 1 together"):
        TensorData(X, Y, valid=0.6, test=0.4)


@pytest.mark.parametrize("valid", [None, [X, Y], (X,)])
def test_what_is_no_split_is_an_error_that_says_what_is(valid):
    with pytest.raises(DataError, match=r"valid is a (NoneType|list|tuple); give a fraction.*or a tuple of two"):
        TensorData(X, Y, valid=valid)
