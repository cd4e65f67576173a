"""Rows for new words."""

from __future__ import annotations

import pytest
import torch

from training.checkpoint.new_tokens import fill_new_rows


@pytest.fixture
def weight():
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(0))


def test_a_new_row_is_the_mean_of_the_rows_that_describe_it_or_of_all(weight):
    before = weight.clone()
    fill_new_rows(weight, 9, [[1, 4, 4], None])
    assert torch.allclose(weight[9], (before[1] + 2 * before[4]) / 3, atol=1e-6)
    assert torch.allclose(weight[10], before[:9].mean(dim=0), atol=1e-6)
    assert torch.equal(weight[:9], before[:9]) and torch.equal(weight[11], before[11]), "no other row is touched"


def test_rows_that_are_known_stay(weight):
    before = weight.clone()
    fill_new_rows(weight, 9, [[1], None, [2]], known=2)
    assert torch.equal(weight[:11], before[:11])
    assert torch.equal(weight[11], before[2])
