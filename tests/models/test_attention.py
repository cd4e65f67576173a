"""The door of attention: what a query sees, and which part of a sequence a process computes."""

import math

import pytest
import torch
from torch import Tensor, nn

from models import sequence
from models.attention import attend
from models.gpt2 import gpt2
from models.llama import llama
from models.seeds import Samples, by_sample, computing
from models.transformer import transformer


def qkv(heads: int = 4, kv_heads: int = 4, length: int = 7, width: int = 6, of_values: int | None = None):
    generator = torch.Generator().manual_seed(1)
    shapes = (heads, width), (kv_heads, width), (kv_heads, of_values or width)
    return tuple(torch.randn(2, h, length, w, generator=generator, dtype=torch.float64) for h, w in shapes)


def one_by_one(q, k, v, scale=None, window=None, softcap=None, documents=None) -> Tensor:
    """Attention as sums over numbers."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b, head, row in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        of_keys, own = head * k.shape[1] // q.shape[1], range(row + 1 if window is None else min(window, row + 1))
        keys = [row - back for back in own if documents is None or documents[b, row - back] == documents[b, row]]
        scores = [float(q[b, head, row] @ k[b, of_keys, key]) * (scale or q.shape[3] ** -0.5) for key in keys]
        if softcap is not None:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        total = sum(map(math.exp, scores))
        for key, score in zip(keys, scores, strict=True):
            out[b, head, row] += math.exp(score) / total * v[b, of_keys, key]
    return out


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 4]])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"window": 1},
        {"window": 3},
        {"softcap": 0.7},
        {"documents": DOCUMENTS},
        {"scale": 2.0, "window": 4, "softcap": 1.5, "documents": DOCUMENTS},
    ],
    ids=lambda options: " ".join(options),
)
def test_a_query_sees_the_keys_that_it_should(options, kv_heads):
    for of_values in (6, 3):
        q, k, v = qkv(kv_heads=kv_heads, of_values=of_values)
        torch.testing.assert_close(attend(q, k, v, **options), one_by_one(q, k, v, **options), rtol=0, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "window": 3, "softcap": 0.7, "documents": DOCUMENTS}])
def test_dropout_is_of_the_probabilities(options):
    dropout = by_sample("h.0.attention", nn.Dropout(0.25))
    q, k, v = qkv(kv_heads=2)
    eye = torch.eye(7, dtype=q.dtype).expand(2, 2, 7, 7)  # of these values, the result is the probabilities
    with computing(Samples(2, seed=3, step=1)):
        mask = dropout(torch.ones(2, 4, 7, 7, dtype=q.dtype))
    with computing(Samples(2, seed=3, step=1)):
        dropped = attend(q, k, v, dropout=dropout, **options)
    wanted = (attend(q, k, eye, **options) * mask) @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(dropped, wanted, rtol=0, atol=1e-14)
    assert torch.equal(attend(q, k, v, dropout=dropout.eval(), **options), attend(q, k, v, **options))


class Given:
    """A part of a sequence of which the keys and values of the whole are known."""

    def __init__(self, positions: list[int], whole: list[tuple[Tensor, Tensor, Tensor]], length: int) -> None:
        self.positions, self.whole, self.length = torch.tensor(positions), iter(whole), length

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        every = next(self.whole)
        for own, of_all in zip((q, k, v), every, strict=True):
            torch.testing.assert_close(own, of_all[:, :, self.positions], rtol=0, atol=1e-14)
        return attend_whole(*every, **options)[:, :, self.positions]


def attend_whole(*tensors: Tensor, **options) -> Tensor:
    with sequence.computing_part(None):
        return attend(*tensors, **options)


class Noting:
    """The whole sequence, noting what is attended to."""

    def __init__(self, length: int) -> None:
        self.positions, self.length, self.whole = torch.arange(length), length, []

    def attend(self, *tensors: Tensor, **options) -> Tensor:
        self.whole.append(tensors)
        return attend_whole(*tensors, **options)


def built(chain) -> nn.Sequential:
    layers = chain.build(chain.names, 3, torch.device("cpu"), torch.float64)
    return nn.Sequential(*map(layers.get_submodule, chain.names)).eval()


@pytest.mark.parametrize("model", [gpt2, llama, transformer])
def test_a_part_of_a_text_has_the_numbers_that_it_has_in_the_whole(model):
    sizes = {} if model is transformer else {"size": "tiny"}
    layers = built(model(**sizes, vocab_size=31))
    tokens = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(1))
    noting = Noting(8)
    with sequence.computing_part(noting):
        whole = layers(tokens)
    assert torch.equal(whole, layers(tokens)) and len(noting.whole) > 1
    for own in ([0, 1, 6, 7], [2, 3, 4, 5]):
        with sequence.computing_part(Given(own, noting.whole, 8)):
            torch.testing.assert_close(layers(tokens[:, own]), whole[:, own], rtol=0, atol=1e-13)
