"""Expert parallelism: replicas that share experts train as one process does, and it as plain arithmetic says."""


import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import cases
import pytest
import torch
import torch.nn.functional as F
from cases import Layout, Recipe, assert_same_training, train
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from models.causal_lm import causal_lm
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


SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=24)
SIZES |= dict(vocab_size=WORDS, max_position_embeddings=64, num_experts_per_tok=2, pad_token_id=None)
ROUTED = dict(n_routed_experts=4, moe_intermediate_size=12, n_shared_experts=1, first_k_dense_replace=1, topk_group=1)
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
CONFIGS = {
    "mixtral": dict(num_local_experts=4),
    "qwen2_moe": dict(num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=12),
    "qwen3_moe": dict(num_experts=4, moe_intermediate_size=12, head_dim=8),
    "olmoe": dict(num_experts=4),
    "deepseek_v2": {**ROUTED, **LATENT, "n_group": 1},
    "deepseek_v3": {**ROUTED, **LATENT, "n_group": 2},
    "glm4_moe": {**ROUTED, "n_group": 1, "head_dim": 8},
    "gpt_oss": dict(num_local_experts=4, head_dim=8),
}


@cache
def of_transformers(kind: str) -> Chain:
    """A small model of one of transformers' mixtures."""
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({"model_type": kind, **SIZES, **CONFIGS[kind]}))
        return causal_lm(str(config))


def train_mixture(layout, recipe):
    chain = of_transformers(recipe.model) if recipe.model in CONFIGS else mixture()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "chain_and_batches", lambda recipe: (chain, batch_at))
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


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_mixture_of_transformers_is_divided_by_the_form_of_its_experts(ranks, kind):
    """Routers that compute in float32 round the gradient of each micro-batch: one process has the same ones."""
    recipe = replace(RECIPE, model=kind, steps=2)
    reference, *_ = ranks.run(1, train_mixture, TWO.same_cut, recipe)
    assert any(".experts." in name for name in reference.state)
    assert_same_training(ranks.run(2, train_mixture, TWO, recipe), reference, EXACT)
