"""Auxiliary losses of a mixture of experts: in every layout those of a plain loop over the whole global batch."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Layout, planned
from torch import nn

from data.dataset import Batch
from models.chain import Chain
from models.losses import IGNORED
from models.moe import moe
from parallel.examination import examine
from parallel.strategy import Options, build_strategy

SIZES = dict(n_layer=2, n_head=2, kv_heads=2, head_dim=4, n_embd=8, experts=4, expert_width=6, vocab_size=30)
# Factors so large that a fault of any part of the loss is seen in all weights.
CASES = {
    "losses": dict(balance=0.5, z_loss=0.2),
    "sigmoid scores, a shared expert, a bias": dict(
        balance=0.3, z_loss=0.0, scores="sigmoid", shared_experts=1, bias_rate=0.05, tied=False
    ),
    "a bias only": dict(balance=0.0, z_loss=0.0, bias_rate=0.05, renormalize=False, top_k=1),
    "no losses": dict(balance=0.0, z_loss=0.0),
}
GENERATOR = torch.Generator().manual_seed(5)
TOKENS = [torch.randint(30, (8, 7), generator=GENERATOR) for _ in range(3)]
STEPS, RATE = 3, 0.3


def batch_at(step: int) -> Batch:
    tokens = TOKENS[step - 1]
    targets = tokens[:, 1:].clone()
    targets[0, 1:] = targets[5, 4:] = IGNORED  # unequally many in the parts of the batch
    return Batch(tokens[:, :-1], targets)


def chain_of_case(case: str) -> Chain:
    return moe(**{**SIZES, **CASES[case]}, block_size=16, init_std=0.4)


def mixed(mlp: nn.Module, x: torch.Tensor, options: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every expert for every token: the output, the auxiliary loss, how many tokens chose each expert."""
    logits = x @ mlp.gate.weight.T
    scores = logits.sigmoid() if options.get("scores") == "sigmoid" else logits.softmax(-1)
    ranked = scores + mlp.gate.bias if options.get("bias_rate") else scores
    least = ranked.topk(options.get("top_k", 2)).values[..., -1:]
    chosen = (ranked >= least).to(x.dtype).detach()
    weights = scores * chosen
    if options.get("renormalize", True):
        weights = weights / weights.sum(-1, keepdim=True)
    gate, up = torch.einsum("bte,xfe->btxf", x, mlp.experts.gate_up_proj).chunk(2, -1)
    y = torch.einsum("btxf,xef,btx->bte", F.silu(gate) * up, mlp.experts.down_proj, weights)
    if options.get("shared_experts"):
        y = y + mlp.shared_experts(x)
    tokens = x.shape[0] * x.shape[1]
    shares = (scores / scores.sum(-1, keepdim=True)).sum((0, 1)) / tokens
    balance = len(shares) * ((chosen.sum((0, 1)) / tokens) * shares).sum()
    z = logits.exp().sum(-1).log().square().mean()
    return y, options["balance"] * balance + options["z_loss"] * z, chosen.sum((0, 1))


def in_a_loop(case: str) -> list[dict]:
    chain, options = chain_of_case(case), CASES[case]
    layers = chain.build(chain.names, 7, torch.device("cpu"), torch.float64)
    optimizer, found = torch.optim.SGD(layers.parameters(), RATE), []
    for step in range(1, STEPS + 1):
        batch, auxiliary, choices = batch_at(step), torch.zeros(()), {}
        x = layers["embedding"](batch.inputs)
        for name, block in layers.items()[1:-1]:
            x = x + block.self_attn(block.input_layernorm(x))
            y, own, choices[name] = mixed(block.mlp, block.post_attention_layernorm(x), options)
            x, auxiliary = x + y, auxiliary + own
        loss = F.cross_entropy(layers["head"](x).flatten(0, 1), batch.targets.flatten()) + auxiliary
        optimizer.zero_grad()
        loss.backward()
        seen = {"loss": loss.item(), "auxiliary_loss": auxiliary.item()}
        seen |= {f"gradient of {name}": p.grad.clone() for name, p in layers.named_parameters()}
        optimizer.step()
        for name, count in choices.items():
            if options.get("bias_rate"):
                layers[name].mlp.gate.bias += options["bias_rate"] * (count.mean() - count).sign()
        found.append(seen | {name: value.clone() for name, value in layers.state_dict().items()})
    return found


def strategy_of(chain: Chain, layout: Layout, recompute: bool = False, precision: str = "fp64", sample=None):
    world = dist.get_world_size() if dist.is_initialized() else 1
    sample = batch_at(1) if sample is None else sample
    plan = planned(layout, chain, len(sample), precision=precision, where={"world_size": world, "recompute": recompute})
    mesh = plan.mesh(dist.get_rank() if world > 1 else 0).connect(60)
    microbatch = sample.chunks(plan.dp * plan.chunks)[0]
    plan = replace(plan, **examine(chain, microbatch).for_plan())
    return build_strategy(plan, chain, mesh, Options(seed=7, timeout_s=60), microbatch, 0)


def trained(layout: Layout, case: str, recompute: bool, evaluate: bool = True) -> list[dict]:
    """What this rank sees in each step: its numbers, gradients and weights under the names of the whole model."""
    strategy = strategy_of(chain_of_case(case), layout, recompute)
    optimizer, found = torch.optim.SGD(strategy.parameters(), RATE), []
    for step in range(1, STEPS + 1):
        mine = batch_at(step).chunks(strategy.plan.dp)[strategy.mesh.replica]
        result = strategy.train_step(mine, step)
        seen = {"loss": result.loss, **result.metrics}
        named = {f"gradient of {name}": (name, p.grad) for name, p in strategy.named_parameters()}
        seen |= {name: strategy.whole(*pair).clone() for name, pair in named.items()}
        optimizer.step()
        found.append(seen | {n: strategy.whole(n, p).detach().clone() for n, p in strategy.state_dict().items()})
        if evaluate:
            strategy.eval_step(mine)
    return found


ONE = [(Layout("single", chunks=chunks), recompute) for chunks in (1, 2, 4) for recompute in (False, True)]
SEVERAL = [
    (Layout("ddp", dp=2), False),
    (Layout("ddp", dp=2, chunks=2), True),
    (Layout("fsdp", dp=2), False),
    (Layout("fsdp", dp=2, chunks=2), True),
    (Layout("fsdp", dp=2, chunks=2, reshard=False), False),
    (Layout("pipelined", pp=2, chunks=2, schedule="1f1b"), False),
    (Layout("pipelined", pp=2, chunks=4, schedule="interleaved_zero_bubble"), False),
    (Layout("model_parallel", pp=2, chunks=2), False),
    (Layout("tensor", tp=2), False),
    (Layout("tensor", tp=2, chunks=2, sequence=True), True),
    (Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="1f1b"), True),
    (Layout("pipe_fsdp", dp=2, pp=2, chunks=2), False),
]


@pytest.fixture(scope="module")
def loops():
    return {case: in_a_loop(case) for case in CASES}


def cells() -> list:
    """Each layout with losses, and the others of a few layouts; all of them are slow."""
    quick = {"losses": ONE + SEVERAL, "no losses": [ONE[3]]}
    others = [ONE[0], ONE[3], *(pair for pair in SEVERAL if pair[0].strategy in ("pipe_ddp", "fsdp") and pair[1])]
    pairs = [(case, *pair) for pair in ONE + SEVERAL for case in CASES]
    slow = [pytest.mark.slow]
    return [
        pytest.param(*cell, marks=slow * (cell[1:] not in quick.get(cell[0], others)), id=f"{cell[0]}, {cell[1]}")
        for cell in pairs
    ]


@pytest.mark.parametrize("case, layout, recompute", cells())
def test_losses_gradients_weights_and_biases_are_those_of_a_plain_loop(ranks, loops, layout, recompute, case):
    run = ranks.run(layout.processes, trained, layout, case, recompute)
    names = set()
    for step, wanted in enumerate(loops[case]):
        for rank in run:
            for name, value in rank[step].items():
                near = torch.as_tensor(wanted[name], dtype=torch.float64)
                assert (value - near).norm() <= 1e-12 * near.norm().clamp(min=1e-3), (step, name)
                names.add(name)
    skipped = {"auxiliary_loss"} if not (CASES[case]["balance"] or CASES[case]["z_loss"]) else set()
    assert names == loops[case][0].keys() - skipped - chain_of_case(case).tied.keys()
