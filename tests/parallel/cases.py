"""What the tests of strategies run on each rank: a short training under one layout, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import pretend_cuda
import torch
import torch.distributed as dist
from small_models import chain_and_batches

from data.dataset import Batch
from models.chain import Chain
from parallel import layout
from parallel.examination import examine
from parallel.plan import Plan
from parallel.planning import make_plan
from parallel.strategy import Options, Strategy, build_strategy
from parallel.timeline import Interval


@dataclass(frozen=True)
class Layout(layout.Layout):
    """A layout that a test shows in words: ``pipe_ddp dp=2 pp=2 chunks=2 1f1b``."""

    comm_hook: str = "none"

    @property
    def same_cut(self) -> Layout:
        """One process with the same micro-batches, for what depends on them: BatchNorm, and rounding to 16 bits."""
        return Layout("single", chunks=self.dp * self.chunks)

    def __str__(self) -> str:
        divided = [word for key, value in self.divided.items() if (word := self._word(key, value))]
        words = [self.strategy, f"dp={self.dp}", f"pp={self.pp}", *divided, f"chunks={self.chunks}"]
        words += [self.schedule] * self.pipelined + [self.order] * (self.order != "dp_pp")
        words += [] if self.balance == "uniform" else [str(self.balance)]
        words += [] if self.shard is None else [f"shard={self.shard}"]
        words += [] if self.reshard is None else [f"reshard={self.reshard}"]
        words += [] if self.comm_hook == "none" else [self.comm_hook]
        return " ".join(words)

    @staticmethod
    def _word(key: str, value) -> str:
        return f"{key}={value}" if not isinstance(value, bool) else key * value


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
    fused: bool = False  # SGD's fused kernel
    sync_batchnorm: bool = False
    interleaved: bool = False  # the batch's halves in turn, a quarter of the batch at a time
    bucket_mb: float = 25.0
    widths: tuple[int, ...] = ()  # of the training batches, in turn; evaluations have the whole width
    overflow_at_step: int | None = None  # of one parameter's gradient, in the first layer only
    device: str = "cpu"
    lora: tuple[str, ...] | None = None  # the linear layers with adapters


@dataclass
class Result:
    """What one rank saw: numbers of every step, its share of the weights, its evaluations."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # other names' copies, by the canonical name
    evaluations: list[list[float]] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)  # of the evaluations and their targets, on rank 0
    layers: list[str] = field(default_factory=list)
    parameters: int = 0  # the numbers of elements
    intervals: list[list[Interval]] = field(default_factory=list)
    waits: list[dict[str, int]] = field(default_factory=list)  # for a pretend GPU, by step


class Kept:
    """Keeps what the last layer returns in evaluations, and the targets."""

    alone = False

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def select(self, outputs, targets):
        return outputs

    def take(self, selected, targets):
        self.tensors += [*selected, targets]


def parallel_section(layout: Layout, **changes) -> SimpleNamespace:
    """The configuration section that a layout stands for."""
    others = {"threads": None, "timeout_s": 60.0, "bucket_mb": 25.0, "comm_hook": layout.comm_hook}
    others["sync_batchnorm"] = False
    return SimpleNamespace(**{**layout.section(), **others, **changes})


def planned(
    layout: Layout,
    chain: Chain,
    batch: int = 24,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    where=None,
    **section,
) -> Plan:
    """The plan of a layout; ``where`` it runs is as in ``make_plan``, ``section`` changes keys of the configuration."""
    parallel = parallel_section(layout, **section)
    return make_plan(parallel, chain, global_batch_size=batch, device=device, precision=precision, **(where or {}))


def pretend_gpus(monkeypatch, count: int) -> None:
    """Have torch say that there are so many."""
    for name, said in {"is_available": True, "device_count": count, "get_device_capability": (9, 0)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, said=said: said)


def plan_of(layout: Layout, recipe: Recipe, chain: Chain, **where) -> Plan:
    """The plan of a layout for a recipe."""
    about = {"recompute": recipe.recompute, **where}
    alike = {key: getattr(recipe, key) for key in ("device", "precision", "bucket_mb", "sync_batchnorm")}
    return planned(layout, chain, recipe.global_batch, where=about, **alike)


def build(layout: Layout, recipe: Recipe) -> tuple[Plan, Strategy]:
    """The plan of a layout and this rank's strategy."""
    chain, batch_at = chain_and_batches(recipe)
    world = dist.get_world_size() if dist.is_initialized() else 1
    plan = plan_of(layout, recipe, chain, world_size=world)
    rank = dist.get_rank() if world > 1 else 0
    mesh = plan.mesh(rank).connect(timeout_s=60)
    sample = batch_at(0).chunks(plan.dp * plan.chunks)[0]
    plan = replace(plan, **examine(chain, sample).for_plan())
    return plan, build_strategy(plan, chain, mesh, Options(seed=7, timeout_s=60), sample, rank)


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
        strategy.loss_scale.update(outcome)
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
            batch, kept = _pad_last(batch_at(0)).chunks(plan.dp)[share], Kept(result.outputs)
            sums = strategy.eval_step(batch, taker=kept)
            result.evaluations.append(strategy.all_sum(sums))
    result.state = _copy(strategy, strategy.state_dict())
    for stage in strategy.stages:
        everything = dict(stage.layers.named_parameters(remove_duplicate=False))
        copies = _copy(strategy, {name: everything[name] for name in everything.keys() & strategy.chain.tied.keys()})
        result.tied += [(strategy.chain.tied[name], tensor) for name, tensor in copies.items()]
    result.intervals = list(strategy.timeline.steps) if strategy.timeline is not None else []
    strategy.close()
    return result


def trainings(ranks) -> Callable[[Layout, Recipe], list[Result]]:
    """``trained(layout, recipe)``: what each rank of a pool saw (``ranks.Ranks``); each training runs once."""
    known = {}

    def trained(layout: Layout, recipe: Recipe) -> list[Result]:
        if (layout, recipe) not in known:
            known[layout, recipe] = ranks.run(layout.processes, train, layout, recipe)
        return known[layout, recipe]

    return trained


def _copy(strategy: Strategy, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named = {name: (strategy.chain.canonical(name), tensor) for name, tensor in state.items()}
    return {name: strategy.whole(*pair).detach().cpu().clone() for name, pair in named.items()}


def _interleave(batch: Batch) -> Batch:
    """Quarters 0, 2, 1, 3: what two replicas of two chunks work on at the same time stands side by side."""
    order = torch.arange(len(batch)).view(4, -1)[[0, 2, 1, 3]].flatten()
    return Batch(batch.inputs[order], batch.targets[order])


def _pad_last(batch: Batch) -> Batch:
    """The batch with its last sample declared padding."""
    weights = torch.ones(len(batch))
    weights[-1] = 0.0
    return replace(batch, weights=weights)


def _overflow(strategy: Strategy) -> torch.utils.hooks.RemovableHandle | None:
    """Where the first layer is, and only there, a gradient becomes infinite."""
    first = strategy.stages[0]
    if first.layers.names[0] != strategy.chain.names[0]:
        return None
    return next(first.parameters()).register_hook(lambda gradient: gradient * math.inf)


# -- how far a run was from another ----------------------------------------------------------------------------------


def weights_of(run: list[Result]) -> dict[str, torch.Tensor]:
    """The whole model's weights, put together from all ranks; replicas and tied copies must hold the same bits."""
    whole: dict[str, torch.Tensor] = {}
    for result in run:
        for name, tensor in result.state.items():
            if name in whole:
                assert torch.equal(whole[name], tensor), f"replicas differ in {name}"
            whole[name] = tensor
    for name, tensor in (copy for result in run for copy in result.tied):
        assert torch.equal(whole[name], tensor), f"the copies of {name} differ"
    return whole


def assert_same_training(
    run: list[Result], reference: Result, tolerance: float, of_outputs: float | None = None
) -> None:
    """Losses and gradient norms of every step, evaluations, and every final weight tensor by norm, relative.

    Weights that hardly move would agree by standing still, so each is also compared by how far it moved, to a
    hundred times the tolerance (the last bits of a weight of 1 are many of its small movement).
    """
    for rank, result in enumerate(run):
        assert result.losses == run[0].losses, f"rank {rank} has other losses than rank 0"
        assert result.norms == run[0].norms, f"rank {rank} has other gradient norms than rank 0"
        assert result.evaluations == run[0].evaluations, f"rank {rank} has other evaluations than rank 0"
    far = {
        "loss": _farthest(run[0].losses, reference.losses),
        "gradient norm": _farthest(run[0].norms, reference.norms),
    }
    for (loss, count, *_), (wanted_loss, wanted_count, *_) in zip(
        run[0].evaluations, reference.evaluations, strict=True
    ):
        assert count == wanted_count, f"an evaluation counted {count} terms, not {wanted_count}"
        far["evaluation"] = max(far.get("evaluation", 0.0), _farthest([loss], [wanted_loss]))
    assert len(run[0].outputs) == len(reference.outputs) and not any(result.outputs for result in run[1:])
    for i, (output, wanted) in enumerate(zip(run[0].outputs, reference.outputs, strict=True)):
        assert output.shape == wanted.shape
        far[f"output {i}"] = ((output.double() - wanted).norm() / wanted.double().norm().clamp(min=1e-30)).item()
    weights = weights_of(run)
    assert weights.keys() == reference.state.keys()
    for name, wanted in reference.state.items():
        if torch.equal(weights[name], wanted):  # frozen, or without numbers
            continue
        rounding = torch.finfo(wanted.dtype).eps if wanted.is_floating_point() else 0.0
        wanted, start = wanted.double(), reference.initial[name].double()
        error, moved = (weights[name].double() - wanted).norm(), (wanted - start).norm()
        # A bias before a BatchNorm has no gradient but rounding, and moves by that.
        moved = max(moved, 1000 * rounding * wanted.norm())
        far[name] = max(error / wanted.norm(), error / moved / 100).item()
    limits = {what: of_outputs if of_outputs and what.startswith("output ") else tolerance for what in far}
    wrong = {what: distance for what, distance in far.items() if not distance <= limits[what]}
    assert not wrong, f"farther than {tolerance} from single, relative: {wrong}"


def _farthest(values: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(values, wanted, strict=True))
