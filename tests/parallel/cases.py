"""What the tests of strategies run on each rank: a short training under one layout, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pretend_cuda
import torch
import torch.distributed as dist
from tuple_models import TUPLE_MODELS

from data.batch import Batch
from models.chain import Chain
from models.classifier import classifier
from models.convnet import convnet
from models.gpt2 import gpt2
from models.resnet50 import GROUPS, resnet50
from models.toy import toy
from models.transformer import transformer
from parallel.build import build_strategy
from parallel.plan import Plan, make_plan
from parallel.rows import whole
from parallel.strategies import strategy_info
from parallel.strategy import Options, Strategy
from parallel.timeline import Interval

VOCABULARY, TOKENS = 512, 32


@dataclass(frozen=True)
class Layout:
    """A strategy in words that a test can show: ``pipe_ddp dp=2 pp=2 chunks=2 1f1b``."""

    name: str
    dp: int = 1
    pp: int = 1
    chunks: int = 1
    schedule: str = "gpipe"
    stages_per_rank: int | None = None
    balance: str | tuple[int, ...] = "uniform"
    order: str = "dp_pp"
    shard: int | None = None
    reshard: bool | None = None
    comm_hook: str = "none"

    @property
    def pipelined(self) -> bool:
        return strategy_info(self.name).stage_per_rank

    @property
    def ranks(self) -> int:
        return self.dp * self.pp if self.pipelined else self.dp

    @property
    def single(self) -> Layout:
        """One process with the same micro-batches."""
        return Layout("single", chunks=self.dp * self.chunks)

    def __str__(self) -> str:
        words = [self.name, f"dp={self.dp}", f"pp={self.pp}", f"chunks={self.chunks}"]
        words += [self.schedule] * self.pipelined + [self.order] * (self.order != "dp_pp")
        words += [] if self.balance == "uniform" else [str(self.balance)]
        words += [] if self.shard is None else [f"shard={self.shard}"]
        words += [] if self.reshard is None else [f"reshard={self.reshard}"]
        words += [] if self.comm_hook == "none" else [self.comm_hook]
        return " ".join(words)


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how; ``lr`` and ``momentum`` are SGD's."""

    model: str
    global_batch: int
    lr: float
    momentum: float = 0.9
    steps: int = 20
    clip: float | None = None
    precision: str = "fp32"
    eval_every: int | None = None
    recompute: bool = False
    dropout: float = 0.1
    padded: bool = False  # the last sample of every training batch counts 0
    cut: bool = False  # the last sample of every training batch is not there at all (one process, one chunk)
    loss_scale: float | None = None  # where float16 starts from
    double_gradients_of_stage: int | None = None  # a mistake, made on purpose
    fused: bool = False  # SGD's fused kernel
    sync_batchnorm: bool = False
    interleaved: bool = False  # the batch's halves in turn, a quarter of the batch at a time
    bucket_mb: float = 25.0
    overflow_at_step: int | None = None  # of one parameter's gradient, in the first layer only
    device: str = "cpu"


@dataclass
class Result:
    """What one rank saw: numbers of every step, its share of the weights, its evaluations."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: dict[str, torch.Tensor] = field(default_factory=dict)  # tied parameters under the names of both ends
    evaluations: list[list[float]] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    parameters: int = 0
    intervals: list[list[Interval]] = field(default_factory=list)
    waits: list[dict[str, int]] = field(default_factory=list)  # for a pretend GPU, by step


def parallel_section(layout: Layout, **changes) -> SimpleNamespace:
    """The configuration section that a layout stands for."""
    section = dict(
        name=layout.name,
        dp=layout.dp,
        pp=layout.pp,
        chunks=layout.chunks,
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank,
        balance=layout.balance if isinstance(layout.balance, str) else list(layout.balance),
        order=layout.order,
        devices=None,
        threads=None,
        timeout_s=60.0,
        bucket_mb=25.0,
        shard=layout.shard,
        reshard=layout.reshard,
        comm_hook=layout.comm_hook,
    )
    return SimpleNamespace(**{**section, **changes})



def short_resnet() -> Chain:
    """ResNet-50 with 5 of its 16 blocks, each kind of them, narrower but for the last."""
    blocks = {"layer1": (2, 16, 1), "layer2": (1, 32, 2), "layer3": (1, 64, 2), "layer4": (1, 512, 2)}
    with mock.patch.dict(GROUPS, blocks):
        return resnet50()


# (channels, size, chain) of small versions of the image models.
IMAGES = {
    "resnet50": (3, 40, short_resnet),
    "whole resnet50": (3, 40, resnet50),
    "classifier": (3, 16, lambda: classifier(image_size=16)),
    "convnet": (1, 12, lambda: convnet(image_size=12)),
}
LANGUAGE = {
    "gpt2": lambda dropout: gpt2(size="tiny", vocab_size=VOCABULARY, dropout=dropout),
    "transformer": lambda dropout: transformer(
        d_model=32, d_hid=64, n_head=2, n_layer=3, dropout=dropout, vocab_size=VOCABULARY
    ),
}


def chain_and_batches(recipe: Recipe) -> tuple[Chain, Callable[[int], Batch]]:
    """A small model, and its global batch as a function of the step."""
    if recipe.model == "toy":
        return toy(), lambda step: _toy_batch(recipe.global_batch, step)
    if recipe.model in TUPLE_MODELS:
        build_chain, batch = TUPLE_MODELS[recipe.model]
        return build_chain(), lambda step: batch(recipe.global_batch, step)
    if recipe.model in IMAGES:
        channels, size, build_chain = IMAGES[recipe.model]
        return build_chain(), lambda step: _image_batch(recipe.global_batch, channels, size, step)
    return LANGUAGE[recipe.model](recipe.dropout), lambda step: _token_batch(recipe.global_batch, step)


def _toy_batch(size: int, step: int) -> Batch:
    inputs = torch.randn(size, 10, generator=torch.Generator().manual_seed(step))
    return Batch(inputs, inputs[:, :5].abs() + 1.0)


def _image_batch(size: int, channels: int, pixels: int, step: int) -> Batch:
    """Bright where the class says so: something to learn in twenty steps."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(10, (size,), generator=generator)
    images = torch.randn(size, channels, pixels, pixels, generator=generator)
    return Batch(images + labels.view(-1, 1, 1, 1) / 5 - 1, labels)


def _token_batch(size: int, step: int) -> Batch:
    """Few words are frequent, as in a language: there is something to learn in twenty steps."""
    draws = torch.rand(size, TOKENS + 1, generator=torch.Generator().manual_seed(step))
    tokens = (draws.pow(4) * VOCABULARY).long()
    return Batch(tokens[:, :-1], tokens[:, 1:])


def build(layout: Layout, recipe: Recipe) -> tuple[Plan, Strategy]:
    """The plan of a layout and this rank's strategy."""
    chain, batch_at = chain_and_batches(recipe)
    world = dist.get_world_size() if dist.is_initialized() else 1
    plan = make_plan(
        parallel_section(layout),
        chain,
        global_batch_size=recipe.global_batch,
        device=recipe.device,
        precision=recipe.precision,
        world_size=world,
    )
    rank = dist.get_rank() if world > 1 else 0
    mesh = plan.mesh(rank).connect(timeout_s=60)
    sample = batch_at(0).chunks(plan.dp * plan.chunks)[0]
    options = Options(
        seed=7,
        timeout_s=60,
        recompute=recipe.recompute,
        sync_batchnorm=recipe.sync_batchnorm,
        comm_hook=layout.comm_hook,
        bucket_mb=recipe.bucket_mb,
    )
    return plan, build_strategy(plan, chain, mesh, options, sample, rank)


def train(layout: Layout, recipe: Recipe) -> Result:
    """Train and report. The same function for one process and for every rank of many."""
    plan, strategy = build(layout, recipe)
    _, batch_at = chain_and_batches(recipe)
    share = strategy.mesh.replica
    parameters = list(strategy.parameters())
    sgd = partial(torch.optim.SGD, lr=recipe.lr, momentum=recipe.momentum, fused=recipe.fused)
    optimizer = sgd(parameters) if parameters else None
    result = Result(
        layers=[name for stage in strategy.stages for name in stage.layers.names],
        parameters=sum(p.numel() for p in parameters),
        initial=_copy(strategy, strategy.state_dict()),
    )
    if recipe.loss_scale is not None:
        strategy.loss_scale.scale = recipe.loss_scale
    for step in range(1, recipe.steps + 1):
        batch = _pad_last(batch_at(step)) if recipe.padded else batch_at(step)
        if recipe.interleaved:
            batch = _interleave(batch)
        if recipe.cut:
            batch = Batch(batch.inputs[:-1], batch.targets[:-1])
        hook = _overflow(strategy) if step == recipe.overflow_at_step else None
        mine = batch.chunks(plan.dp)[share]
        if recipe.device == "cuda":
            mine = mine.pin_memory()
            pretend_cuda.take_waits()
        outcome = strategy.train_step(mine, step)
        if hook is not None:
            hook.remove()
        strategy.loss_scale.update(outcome.finite)
        _double(strategy, plan, recipe.double_gradients_of_stage)
        if recipe.clip is not None:
            strategy.clip_grad_norm_(recipe.clip, outcome.grad_norm)
        if optimizer is not None and outcome.finite:
            optimizer.step()
        if recipe.device == "cuda":
            result.waits.append(pretend_cuda.take_waits())
        result.losses.append(outcome.loss)
        result.norms.append(outcome.grad_norm)
        result.finite.append(outcome.finite)
        result.loss_scales.append(strategy.loss_scale.scale)
        if recipe.eval_every and step % recipe.eval_every == 0:
            sums = strategy.eval_step(_pad_last(batch_at(0)).chunks(plan.dp)[share])
            result.evaluations.append(strategy.all_sum(sums))
    result.state = _copy(strategy, strategy.state_dict())
    ends = {*strategy.chain.tied, *strategy.chain.tied.values()}
    for stage in strategy.stages:
        everything = stage.layers.named_parameters(remove_duplicate=False)
        result.copies |= _copy(strategy, {name: parameter for name, parameter in everything if name in ends})
    result.intervals = list(strategy.timeline.steps)
    strategy.close()
    return result


def _copy(strategy: Strategy, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: whole(tensor, strategy.mesh.inner_group).detach().cpu().clone() for name, tensor in state.items()}


def _interleave(batch: Batch) -> Batch:
    """Quarters 0, 2, 1, 3: what two replicas of two chunks work on at the same time stands side by side."""
    order = torch.arange(len(batch)).view(4, -1)[[0, 2, 1, 3]].flatten()
    return Batch(batch.inputs[order], batch.targets[order])


def _pad_last(batch: Batch) -> Batch:
    """The batch with its last sample declared padding."""
    weights = torch.ones(len(batch))
    weights[-1] = 0.0
    return Batch(batch.inputs, batch.targets, weights)


def _double(strategy: Strategy, plan: Plan, index: int | None) -> None:
    for stage, planned in zip(strategy.stages, plan.stages_of(strategy.mesh.position), strict=True):
        if planned.index == index:
            for parameter in stage.parameters():
                parameter.grad *= 2


def _overflow(strategy: Strategy) -> torch.utils.hooks.RemovableHandle | None:
    """Where the first layer is, and only there, a gradient becomes infinite."""
    first = strategy.stages[0]
    if first.layers.names[0] != strategy.chain.names[0]:
        return None
    return next(first.parameters()).register_hook(lambda gradient: gradient * math.inf)
