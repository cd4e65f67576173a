"""Rows for new words, and the tokens that a model draws."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.chain import Layers
from models.generate import generate
from models.new_rows import fill_new_rows

CPU = torch.device("cpu")


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


class Successor(nn.Module):
    """The likeliest token is the last one plus 1; ``seen`` are the lengths that came in. Tokens from 8 on pad."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, tokens):
        self.seen.append(tokens.shape[1])
        return nn.functional.one_hot((tokens + 1) % 8, 10) * 2.0 + torch.tensor([0.0] * 8 + [100.0] * 2)


@pytest.fixture
def layers():
    return Layers([("body", Successor()), ("head", nn.Identity())])


def draw(layers, count=6, **options):
    defaults = {"positions": 4, "vocab_size": 8, "temperature": 1.0, "top_k": None, "seed": 1, "device": CPU}
    return generate(layers, [5], count, **{**defaults, **options})


def test_temperature_0_takes_the_likeliest_token_that_is_no_padding(layers):
    assert draw(layers, temperature=0) == [6, 7, 0, 1, 2, 3]
    assert draw(layers, top_k=1) == [6, 7, 0, 1, 2, 3]


def test_the_model_sees_no_more_than_its_positions(layers):
    draw(layers)
    assert layers["body"].seen == [1, 2, 3, 4, 4, 4]


def test_one_seed_gives_one_text_and_another_seed_another(layers):
    assert draw(layers, 40) == draw(layers, 40) != draw(layers, 40, seed=2)
    assert set(draw(layers, 400)) == set(range(8))


def test_the_colder_the_surer(layers):
    def sure(temperature):
        drawn = [5, *draw(layers, 300, temperature=temperature)]
        return sum(b == (a + 1) % 8 for a, b in zip(drawn[:-1], drawn[1:], strict=True))

    assert sure(1e-30) == 300 > sure(0.5) > sure(2.0)
