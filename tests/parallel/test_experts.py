"""Expert parallelism: replicas that share experts train as one process does, and it as plain arithmetic says."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import cases
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Layout, Recipe, assert_same_training, planned, train
from ranks import Ranks as Pool
from slow_cases import with_slow
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from common.errors import ModelError, PlanError
from models.causal_lm import causal_lm
from models.chain import Chain, LayerSpec
from models.cut import Columns, Experts, Rows
from models.gpt2 import gpt2
from models.lora import adapt
from models.losses import TokenCrossEntropy
from parallel.axes.experts import ExpertParallel
from parallel.examination import Examination, examine
from parallel.mesh import EXPERTS as ALONG
from parallel.mesh import Ranks
from parallel.supported import check_facts

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

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.other_norm, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(dropout)
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


def mixture(dropout: float = 0.1) -> Chain:
    layers = [LayerSpec("embedding", partial(nn.Embedding, WORDS, WIDTH))]
    layers += [LayerSpec(f"layers.{i}", partial(Mixture, dropout)) for i in range(2)] + [LayerSpec("head", Head)]
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
    chain = of_transformers(recipe.model) if recipe.model in CONFIGS else mixture(recipe.dropout)
    chain = chain if recipe.lora is None else adapt(chain, 3, 6, recipe.dropout, recipe.lora)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "chain_and_batches", lambda recipe: (chain, batch_at))
        return train(layout, recipe)


TWO, FOUR = Layout("ddp", dp=2, ep=2), Layout("expert", dp=4, ep=4)
ZERO_BUBBLE = Layout("pipe_ddp", dp=2, ep=2, pp=2, chunks=4, schedule="interleaved_zero_bubble")
CELLS = [
    (TWO, {}),
    (TWO, {"lora": ("fc", "router"), "padded": True}),
    (Layout("ddp", dp=2, ep=2, tp=2), {}),
    (Layout("fsdp", dp=2, ep=2, chunks=2), {}),
    (Layout("fsdp", dp=4, ep=2, chunks=2), {}),
    (Layout("pipe_ddp", dp=2, ep=2, pp=2, chunks=4, schedule="1f1b", order="pp_dp"), {"recompute": True}),
    (ZERO_BUBBLE, {}),
]
SLOW = [
    (FOUR, {"recompute": True}),
    (Layout("ddp", dp=4, ep=2, chunks=2), {}),
    (Layout("hsdp", dp=4, ep=2, shard=2), {}),
    (Layout("fsdp", dp=4, ep=2, chunks=2), {"precision": "fp32"}),
    (Layout("hsdp", dp=8, ep=2, shard=4), {"precision": "fp32"}),
    (TWO, {"precision": "bf16"}),
    (FOUR, {}),
    (Layout("ddp", dp=4, ep=2, shard=2, comm_hook="hierarchical"), {}),
    (Layout("ddp", dp=2, ep=2, tp=2, sequence=True), {"recompute": True}),
    (Layout("fsdp", dp=2, ep=2, chunks=2, reshard=False), {"recompute": True}),
    (Layout("fsdp", dp=4, ep=2, chunks=2, reshard=False), {}),
    (Layout("fsdp", dp=4, ep=2), {"recompute": True, "lora": ("fc",)}),
    (Layout("hsdp", dp=8, ep=2, shard=4), {}),
    (Layout("fsdp", dp=2, ep=2, tp=2, sequence=True), {}),
    (Layout("pipe_ddp", dp=2, ep=2, pp=2, chunks=2), {}),
    (ZERO_BUBBLE, {"lora": ("fc",)}),
    (Layout("pipe_ddp", dp=2, ep=2, pp=2, chunks=4, schedule="planned"), {"steps": 5}),
    (Layout("pipe_ddp", dp=2, ep=2, pp=2, tp=2, chunks=2, schedule="1f1b"), {}),
    (Layout("pipe_fsdp", dp=4, ep=2, pp=2, chunks=2), {}),
    (Layout("pipe_fsdp", dp=4, ep=2, pp=2, chunks=2, schedule="1f1b", reshard=True), {"recompute": True}),
    (Layout("pipe_fsdp", dp=2, ep=2, pp=2, chunks=4, schedule="interleaved_zero_bubble"), {}),
]


PARAMS = [
    pytest.param(*cell, id=" ".join([str(cell[0]), *cell[1]]), marks=[pytest.mark.slow] * (cell in SLOW))
    for cell in CELLS + SLOW
]


@pytest.mark.parametrize("layout, changes", PARAMS)
def test_it_is_the_training_of_one_process(ranks, layout, changes):
    recipe = replace(RECIPE, **changes)
    reference, *_ = ranks.run(1, train_mixture, Layout("single"), replace(recipe, recompute=False))
    near = {"fp64": EXACT, "fp32": 1e-5, "bf16": 5e-2}[recipe.precision]
    assert_same_training(ranks.run(layout.processes, train_mixture, layout, recipe), reference, near)


@pytest.mark.parametrize("kind", with_slow(CONFIGS, CONFIGS.keys() - {"mixtral", "gpt_oss"}))
def test_a_mixture_of_transformers_is_divided_by_the_form_of_its_experts(ranks, kind):
    """Routers that compute in float32 round the gradient of each micro-batch: one process has the same ones."""
    recipe = replace(RECIPE, model=kind, steps=2)
    reference, *_ = ranks.run(1, train_mixture, TWO.same_cut, recipe)
    assert any(".experts." in name for name in reference.state)
    assert_same_training(ranks.run(2, train_mixture, TWO, recipe), reference, EXACT)


@pytest.mark.parametrize("layout", [TWO, FOUR], ids=str)
def test_a_rank_has_its_part_of_the_experts_and_all_other_parameters(ranks, layout):
    sizes = {name: p.numel() for name, p in mixture().skeleton().named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    for result in ranks.run(layout.processes, train_mixture, layout, replace(RECIPE, steps=1)):
        assert result.parameters == sum(sizes.values()) - experts + experts // layout.ep


# -- the exchange, beside plain arithmetic -----------------------------------------------------------------------------


def tokens_of(case: str, ranks: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each rank: tokens [n, c], the numbers of their experts [n, k] and the weights."""
    generator, found = torch.Generator().manual_seed(3), []
    for rank in range(ranks):
        n = 0 if case == "a rank without tokens" and rank == 1 else 5 + rank
        x, weights = (torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (WIDTH, CHOSEN))
        chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(n)] or [
            torch.zeros(CHOSEN, dtype=torch.int64)])[:n]  # fmt: skip
        if case in ("one expert has all", "no gradient of tokens"):  # ranks without rows are reached backward
            chosen = torch.zeros_like(chosen)
        found.append((x.requires_grad_(case != "no gradient of tokens"), chosen, weights.requires_grad_()))
    return found


def whole_experts() -> Mlps:
    torch.manual_seed(0)
    return Mlps().double()


def exchanged(case: str) -> list[Tensor | None]:
    """On each rank: its results, and the gradients of its tokens, its weights and its experts."""
    ranks = Ranks([*range(dist.get_world_size())], dist.get_rank(), dist.group.WORLD)
    chain = Chain([LayerSpec("layer", Mlps)], TokenCrossEntropy(), cut={"layer": Experts()})
    axis = ExpertParallel(ALONG, SimpleNamespace(), chain, SimpleNamespace(axis=lambda *_: ranks))
    experts, (x, chosen, weights) = whole_experts(), tokens_of(case, ranks.size)[ranks.index]
    axis.prepare("layer", experts, ())
    with torch.no_grad():
        evaluated = experts(x, chosen, weights)
    y = experts(x, chosen, weights)
    assert torch.equal(y, evaluated)
    (y.sin().sum() * (1 + ranks.index)).backward()
    return [y.detach(), x.grad, weights.grad, *(p.grad for p in experts.parameters())]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", ["usual", "one expert has all", "a rank without tokens", "no gradient of tokens"])
def test_results_and_gradients_are_those_of_all_experts_in_one_place(ranks, case, size):
    experts, seen = whole_experts(), ranks.run(size, exchanged, case)
    for rank, (x, chosen, weights) in enumerate(tokens_of(case, size)):
        y = experts(x, chosen, weights)
        assert_near(seen[rank][0], y.detach())
        if not len(x):  # its gradients have no numbers
            continue
        (y.sin().sum() * (1 + rank)).backward()
        assert (seen[rank][1] is None) == (x.grad is None)
        if x.grad is not None:
            assert_near(seen[rank][1], x.grad)
        assert_near(seen[rank][2], weights.grad)
    each = EXPERTS // size
    for i, parameter in enumerate(experts.parameters()):
        parts = [torch.zeros_like(parameter[:each]) if found[3 + i] is None else found[3 + i] for found in seen]
        assert_near(torch.cat(parts), parameter.grad)


@pytest.mark.slow
def test_ranks_that_share_a_gpu_send_tokens_through_main_memory(ranks):
    """Here on CPUs, through the process group of such ranks."""
    pool = Pool(2, {}, "host")
    try:
        found = pool.run(2, exchanged, "usual")
    finally:
        pool.close()
    for one, other in zip(found, ranks.run(2, exchanged, "usual"), strict=True):
        assert all(map(torch.equal, one, other))


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_one_process_trains_as_plain_torch_does(ranks):
    """Without dropout, whose numbers are this project's own."""
    recipe = replace(RECIPE, dropout=0.0, clip=0.5)
    (found,) = ranks.run(1, train_mixture, Layout("single", chunks=2), recipe)
    layers = nn.Sequential(nn.Embedding(WORDS, WIDTH), Mixture(0.0), Mixture(0.0), Head()).double()
    layers.load_state_dict(renamed(found.initial))
    sgd = torch.optim.SGD(layers.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    for step in range(1, recipe.steps + 1):
        batch = batch_at(step)
        loss = F.cross_entropy(layers(batch.inputs).flatten(0, 1), batch.targets.flatten())
        sgd.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(layers.parameters(), recipe.clip)
        sgd.step()
        assert found.losses[step - 1] == pytest.approx(loss.item(), rel=EXACT)
        assert found.norms[step - 1] == pytest.approx(norm.item(), rel=EXACT)
    for name, weight in renamed(found.state).items():
        torch.testing.assert_close(weight, layers.state_dict()[name], rtol=1e-11, atol=1e-13)


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of an ``nn.Sequential`` of the same layers."""
    places = {"embedding": "0", "layers.0": "1", "layers.1": "2", "head": "3"}
    return {place + key.removeprefix(name): t for key, t in state.items() for name, place in places.items() if
            key.startswith(f"{name}.")}  # fmt: skip


# -- what is refused ---------------------------------------------------------------------------------------------------


def table(**cuts):
    return replace(mixture(), cut={name.replace("_", "."): cut for name, cut in cuts.items()})


class Dropping(Mlps):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)


class Counting(Mlps):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(EXPERTS))


class Normalizing(Mlps):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights / weights.sum(-1, keepdim=True))


class Limiting(Mlps):
    """An expert computes the first three tokens that choose it."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = F.one_hot(chosen.flatten(), EXPERTS).cumsum(0).gather(1, chosen.flatten()[:, None])
        return super().forward(x, chosen, weights * (order.view_as(chosen) <= 3))


class OfTwo(Mlps):
    def forward(self, x: Tensor, both: Tensor) -> Tensor:
        return super().forward(x, both.long(), both)


class Calling(Mixture):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.experts, self.both = kind(), kind is OfTwo

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x.flatten(0, 1)).softmax(-1).topk(CHOSEN, dim=-1)
        return self.experts(x.flatten(0, 1), *([weights] if self.both else [chosen, weights])).view_as(x)


@pytest.mark.parametrize("kind, words", [
    (Mlps, None),
    (Normalizing, r"ep=2 .*output of layers.1.experts \(Normalizing\) is not the sum over .* set parallel.ep=1$"),
    (Limiting, r"output of layers.1.experts \(Limiting\) is not the sum"),
    (OfTwo, r"layers.1.experts \(OfTwo\) does not compute forward\(x \[n, c\], chosen"),
])  # fmt: skip
def test_experts_that_are_no_weighted_sum_are_refused_before_a_run(kind, words):
    first, usual, _, head = mixture().layers
    chain = replace(mixture(), layers=[first, usual, LayerSpec("layers.1", partial(Calling, kind)), head])
    found = examine(chain, batch_at(1))
    with nullcontext() if words is None else pytest.raises(PlanError, match=words):
        ExpertParallel.check_facts(TWO, chain, found)


def alone(module):
    return Chain([LayerSpec("first", nn.Identity), LayerSpec("experts", module)], TokenCrossEntropy(),
                 cut={"experts": Experts()})  # fmt: skip


@pytest.mark.parametrize(
    "chain, keys, words",
    [
        (mixture(), {"dp": 3, "ep": 3}, r"ep=3 does not divide the 4 experts of layers.0.experts; .*ep can be 2, 4$"),
        (mixture(), {"dp": 8, "ep": 8}, r"ep=8 does not divide the 4 experts .*ep can be 2, 4$"),
        (mixture(), {"dp": 1, "ep": 2}, r"ep=2 does not divide the parallel.dp=1 replicas.*set parallel.dp=2$"),
        (mixture(), {"dp": 6, "ep": 4}, r"ep=4 does not divide the parallel.dp=6 .*=4, or parallel.ep to 2 or 3 or 6$"),
        (mixture(), {"dp": 2, "ep": 1}, r"parallel=expert cuts experts among processes, .*set parallel.ep=2$"),
        (mixture(), {"dp": 2, "ep": 0}, r"parallel.ep=0 must be at least 1"),
        *((mixture(), {"name": name, "dp": 1, "ep": 2}, rf"parallel={name} has one replica.* parallel=.*expert")
          for name in ("single", "model_parallel", "data_parallel")),
        (mixture(), {"name": "pipelined", "dp": 1, "ep": 2}, "has one replica"),
        (mixture(), {"name": "hsdp", "dp": 4, "shard": 2, "ep": 4}, r"ep=4 does not divide the 2 replicas of a group"),
        (gpt2("tiny"), {"dp": 2, "ep": 2}, r"ep=2 divides experts, and the chain's cut has no Experts"),
        (table(layers_experts=Experts()), {"dp": 2, "ep": 2}, r"no Experts\(\) that names a module"),
        (table(layers_0=Experts()), {"dp": 2, "ep": 2}, r"must be a stack with one row per expert.* norm.weight \[8\]"),
        (table(layers_0_dropout=Experts()), {"dp": 2, "ep": 2}, r"one row per expert, and they are none"),
        (alone(Dropping), {"dp": 2, "ep": 2}, r"experts has Experts\(\) and dropout"),
        (alone(Counting), {"dp": 2, "ep": 2}, r"experts has Experts\(\) and counts"),
        (table(layers_0_experts=Experts()), {"dp": 2, "tp": 2, "name": "ddp"}, r"does not say where: .*Columns\(\)"),
    ],
)  # fmt: skip
def test_what_experts_cannot_do_is_refused_before_a_process_starts(chain, keys, words):
    with pytest.raises((PlanError, ModelError), match=words):
        planned(Layout("expert", ep=2), chain, 24, **keys)


def test_a_recomputation_for_each_weight_is_refused():
    layout = Layout("pipe_ddp", dp=2, pp=2, ep=2, chunks=4, schedule="interleaved_zero_bubble")
    plan = planned(layout, mixture(), 24, where={"recompute": True})
    found = Examination([*mixture().names])
    with pytest.raises(PlanError, match=r"schedule=interleaved_zero_bubble .*schedule=interleaved_1f1b, or train.act"):
        check_facts(found, mixture(), plan, plan.recompute)
    check_facts(found, mixture(), replace(plan, recompute=False), False)
