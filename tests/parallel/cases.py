"""What the parity tests run on each rank: a short training under one layout, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist

from data.batch import Batch
from models.chain import Chain
from models.gpt2 import gpt2
from models.toy import toy
from parallel.build import build_strategy
from parallel.plan import make_plan
from parallel.strategy import Options


@dataclass(frozen=True)
class Layout:
    """A strategy in words a test can show: ``pipe_ddp dp=2 pp=2 chunks=2 1f1b``."""

    name: str
    dp: int = 1
    pp: int = 1
    chunks: int = 1
    schedule: str = "gpipe"
    stages_per_rank: int | None = None
    balance: str | tuple[int, ...] = "uniform"

    @property
    def ranks(self) -> int:
        return self.dp * self.pp if self.name in ("pipelined", "pipe_ddp") else self.dp

    def __str__(self) -> str:
        return f"{self.name} dp={self.dp} pp={self.pp} chunks={self.chunks} {self.schedule}"


@dataclass
class Result:
    """What one rank saw: the losses and gradient norms of all steps, its share of the weights, its evaluations."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluations: list[list[float]] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    parameters: int = 0


def parallel_section(layout: Layout) -> SimpleNamespace:
    """The configuration section that a layout stands for."""
    return SimpleNamespace(
        name=layout.name,
        dp=layout.dp,
        pp=layout.pp,
        chunks=layout.chunks,
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank,
        balance=layout.balance if isinstance(layout.balance, str) else list(layout.balance),
        order="dp_pp",
        devices=None,
        threads=None,
        timeout_s=60.0,
    )


def chain_and_batch(model: str, global_batch: int) -> tuple[Chain, callable]:
    """A small model and its global batch as a function of the step."""
    if model == "toy":
        return toy(), lambda step: _toy_batch(global_batch, step)
    return gpt2(size="tiny", vocab_size=512, dropout=0.1), lambda step: _token_batch(global_batch, step)


def _toy_batch(size: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, 10, generator=generator)
    return Batch(inputs, torch.randn(size, 5, generator=generator), None)


def _token_batch(size: int, step: int) -> Batch:
    tokens = torch.randint(0, 512, (size, 33), generator=torch.Generator().manual_seed(step))
    return Batch(tokens[:, :-1], tokens[:, 1:], None)


def train(
    layout: Layout, model: str, *, global_batch: int, steps: int, lr: float, clip: float | None = None,
    precision: str = "fp32", eval_every: int | None = None, recompute: bool = False,
) -> Result:
    """Train ``steps`` of SGD and report. The same function for one process and for every rank of many."""
    chain, batch_at = chain_and_batch(model, global_batch)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    plan = make_plan(
        parallel_section(layout), chain, global_batch_size=global_batch, device="cpu", precision=precision,
        world_size=world,
    )
    mesh = plan.mesh(rank).connect(timeout_s=60)
    sample = Batch(*(t[: plan.microbatch_size] for t in (batch_at(0).inputs, batch_at(0).targets)), None)
    strategy = build_strategy(plan, chain, mesh, Options(seed=7, timeout_s=60, recompute=recompute), sample)
    parameters = list(strategy.parameters())
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9) if parameters else None
    result = Result(layers=[n for s in strategy.stages for n in s.layers.names])
    result.parameters = sum(p.numel() for p in parameters)
    for step in range(1, steps + 1):
        outcome = strategy.train_step(batch_at(step).chunks(plan.dp)[mesh.replica], step)
        if clip is not None:
            strategy.clip_grad_norm_(clip, outcome.grad_norm)
        if optimizer is not None:
            optimizer.step()
        result.losses.append(outcome.loss)
        result.norms.append(outcome.grad_norm)
        if eval_every and step % eval_every == 0:
            result.evaluations.append(strategy.all_sum(strategy.eval_step(_padded(batch_at(0), plan, mesh))))
    result.state = {name: tensor.clone() for name, tensor in strategy.state_dict().items()}
    strategy.close()
    return result


def _padded(batch: Batch, plan, mesh) -> Batch:
    """The batch with its last sample declared padding, cut for this replica."""
    weights = torch.ones(len(batch))
    weights[-1] = 0.0
    return Batch(batch.inputs, batch.targets, weights).chunks(plan.dp)[mesh.replica]
