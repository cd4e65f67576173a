"""Expert parallelism: replicas that share experts train as one process does, and it as plain arithmetic says."""


import cases
import pytest
import torch
import torch.nn.functional as F
from cases import Layout, Recipe, assert_same_training, train
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from models.chain import Chain, LayerSpec
from models.cut import Columns, Experts, Rows
from models.losses import TokenCrossEntropy

WIDTH, EXPERTS, CHOSEN, WORDS = 8, 4, 2, 13
EXACT = 1e-12


class Mlps(nn.Module):
    """The experts, as transformers has them: x [n, c], chosen [n, k], weights [n, k] -> [n, c]."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 10)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):  # it has no numbers
            h = F.gelu(torch.einsum("nc,nkdc->nkd", x, self.up[chosen]))
            h = torch.einsum("nkd,nkcd->nkc", h, self.down[chosen]) + self.bias[chosen]
            return (h * weights[..., None]).sum(1)
        y = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            assert expert < self.num_experts
            token, place = torch.where(chosen == expert)
            h = F.linear(F.gelu(F.linear(x[token], self.up[expert])), self.down[expert], self.bias[expert])
            y.index_add_(0, token, h * weights[token, place, None])
        return y


class Mixture(nn.Module):
    """A perceptron that ranks of ``tp`` can share, and a mixture of experts, [b, t, c] -> same.

    Nearly all tokens choose the first expert, and none chooses the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.fc, self.proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Mlps()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(F.gelu(self.fc(self.norm(x))))
        tokens = self.other_norm(x).flatten(0, 1)
        scores = self.router(tokens).tanh() + tokens.new_tensor([1.5, 0.0, 0.0, -4.0])
        weights, chosen = scores.softmax(dim=-1).topk(CHOSEN, dim=-1)
        return x + self.dropout(self.experts(tokens, chosen, weights)).view_as(x)


class Head(nn.Linear):
    """[b, t, c] -> logits."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS)


def mixture(blocks: int = 2) -> Chain:
    layers = [LayerSpec("embedding", lambda: nn.Embedding(WORDS, WIDTH))]
    layers += [LayerSpec(f"layers.{i}", Mixture) for i in range(blocks)] + [LayerSpec("head", Head)]
    table = {"layers.*.experts": Experts(), "*.fc": Columns(), "*.proj": Rows()}
    return Chain(layers, TokenCrossEntropy(), cut=table)


def batch_at(step):
    tokens = torch.randint(WORDS, (8, 6), generator=torch.Generator().manual_seed(step))
    return cases.Batch(tokens, tokens.roll(-1, 1))


RECIPE = Recipe("mixture", global_batch=8, lr=0.2, steps=3, clip=0.5, eval_every=2, precision="fp64")


def train_mixture(layout, recipe):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "chain_and_batches", lambda recipe: (mixture(), batch_at))
        return train(layout, recipe)


TWO, FOUR = Layout("ddp", dp=2, ep=2), Layout("expert", dp=4, ep=4)


@pytest.mark.parametrize(
    "layout",
    [
        TWO,
        FOUR,
        Layout("ddp", dp=4, ep=2, chunks=2),
        Layout("ddp", dp=2, ep=2, tp=2),
        Layout("ddp", dp=2, ep=2, tp=2, sequence=True),
        Layout("fsdp", dp=2, ep=2, chunks=2),
        Layout("fsdp", dp=4, ep=2, chunks=2),
        Layout("hsdp", dp=4, ep=2, shard=2),
        Layout("pipe_ddp", dp=2, ep=2, pp=2, chunks=2),
        Layout("pipe_ddp", dp=2, ep=2, pp=2, chunks=4, schedule="interleaved_zero_bubble"),
        Layout("pipe_fsdp", dp=4, ep=2, pp=2, chunks=2),
    ],
    ids=str,
)
def test_it_is_the_training_of_one_process(ranks, layout):
    reference, *_ = ranks.run(1, train_mixture, Layout("single"), RECIPE)
    run = ranks.run(layout.processes, train_mixture, layout, RECIPE)
    assert_same_training(run, reference, EXACT)
