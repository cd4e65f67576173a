"""Every layout that a model, a batch and a number of devices allow, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from common.errors import PlanError
from parallel.schedules import SCHEDULES, has_equal_rounds
from parallel.strategies import STRATEGIES
from planner.costs import Costs
from planner.layout import PlannedLayout
from planner.memory import Allocation, Memory, fullest
from planner.step import Seconds, seconds_of
from planner.work import Works

FREE = ("dp", "pp", "chunks", "schedule", "stages_per_rank")  # what may be typed, and is fixed then
_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble")
_SHORT = 4  # ranks of a pipeline that may be fast with fewer micro-batches than ranks
_PER_RANK = (2, 4)  # stages of a rank, of schedules that take several


@dataclass(frozen=True)
class Devices:
    """The devices on which layouts may run.

    Attributes:
        costs: What it takes there.
        count: How many there are.
        memory: Bytes of each.
        allocation: What it takes of them beside tensors.
        states: Tensors that the optimizer keeps for each parameter.
        whole: Whether a layout must take all devices; else it may leave some to others where its strategy takes fewer.
    """

    costs: Costs
    count: int
    memory: float
    allocation: Allocation
    states: int = 2
    whole: bool = False


@dataclass(frozen=True)
class Candidate:
    """A layout of some layers on some devices, and what is predicted of it."""

    layers: Works
    layout: PlannedLayout
    devices: Devices

    @cached_property
    def memory(self) -> Memory:
        """What its fullest rank holds."""
        return fullest(self.layers, self.layout, self.devices.allocation, self.devices.states)

    @cached_property
    def seconds(self) -> Seconds:
        """What a step takes."""
        return seconds_of(self.layers, self.layout, self.devices.costs)

    @property
    def missing(self) -> float:
        """The bytes that a device lacks for it; at most 0 where it fits."""
        return self.memory.total - self.devices.memory

    @property
    def name(self) -> str:
        """The layout in a few words."""
        return self.layout.name


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        best: The candidates that fit, the fastest first.
        tried: How many layouts there were.
        nearest: For each strategy of which none fits, the one that needs least.
    """

    best: list[Candidate]
    tried: int
    nearest: dict[str, Candidate]


def search(
    layers: Works,
    batch: int,
    kinds: Sequence[Devices],
    tensor: bool = False,
    fixed: Mapping[str, Any] | None = None,
    least: int = 1,
) -> Found:
    """Predict every layout on some devices.

    Args:
        layers: The layers' work.
        batch: Samples of a step.
        kinds: The devices of each kind of layout: some numbers of processes of this machine, or a cluster.
        tensor: Whether layers may be cut (tensor parallelism).
        fixed: What is given of ``FREE``; and "strategy", "shard", "balance" and "recompute", as in ``PlannedLayout``.
        least: Samples of the smallest micro-batch that the layers take.

    Raises:
        PlanError: There is no layout at all, or none fits: it says what comes nearest and by how much it misses.
    """
    fit, nearest, tried, fixed = [], {}, 0, fixed or {}
    for devices in kinds:
        for layout in layouts(layers, devices.costs.devices, batch, devices.count, tensor, fixed, least, devices.whole):
            tried += 1
            candidate = Candidate(layers, layout, devices)
            if candidate.missing <= 0:
                fit.append(candidate)
            elif layout.strategy not in nearest or candidate.missing < nearest[layout.strategy].missing:
                nearest[layout.strategy] = candidate
    if not tried:
        typed = ", ".join(f"{key}={value}" for key, value in fixed.items())
        raise PlanError(f"{len(layers)} layers and train.global_batch_size={batch} allow no layout here with {typed}")
    if not fit:
        closest = min(nearest.values(), key=lambda candidate: candidate.missing)
        raise PlanError(
            f"none of {tried:,} layouts fits into {closest.devices.memory / 2**30:.1f} GiB; what comes nearest, "
            f"{' '.join(closest.layout.words())}, needs {closest.memory.total / 2**30:.1f} GiB, "
            f"{closest.missing / 2**30:.1f} more: take more devices, or a smaller model or batch"
        )
    fit.sort(key=lambda candidate: (candidate.seconds.total, candidate.memory.total))
    known = {candidate.layout.strategy for candidate in fit}
    return Found(fit, tried, {name: candidate for name, candidate in nearest.items() if name not in known})


def layouts(
    layers: Works, per_node: int, batch: int, devices: int, tensor: bool, fixed: Mapping[str, Any], least: int = 1,
    whole: bool = False,
) -> Iterator[PlannedLayout]:  # fmt: skip
    """Yield the layouts of ``search``; ``per_node`` devices are in each node, and ``whole`` is as in ``Devices``."""

    def numbers(key: str, usual: Sequence[int], possible: Sequence[int]) -> Sequence[int]:
        return [n for n in possible if n == fixed[key]] if key in fixed else usual

    for tp in divisors(min(per_node, devices)) if tensor else [1]:
        for pp in numbers("pp", divisors(devices // tp), range(1, devices // tp + 1)):
            possible = [n for n in divisors(batch) if n * tp * pp <= devices]
            for dp in numbers("dp", sorted({1, possible[-1]}), possible):
                for chunks in numbers("chunks", cuts := divisors(batch // dp), cuts):
                    layout = PlannedLayout(
                        dp=dp, tp=tp, pp=pp, chunks=chunks, samples=batch // dp // chunks, node=per_node
                    )
                    if layout.samples >= least and (not whole or dp * tp * pp == devices):
                        yield from _strategies(layers, layout, fixed)


def _strategies(layers: Works, layout: PlannedLayout, fixed: Mapping[str, Any]) -> Iterator[PlannedLayout]:
    for name, info in STRATEGIES.items():
        typed, stages = fixed.get("schedule"), fixed.get("stages_per_rank")
        piped = info.stage_per_rank or not (typed or stages)  # else what is typed has no meaning
        wanted = fixed["strategy"] == name if "strategy" in fixed else piped and not info.several_devices
        if not wanted or info.replicas != (layout.dp > 1) or info.stage_per_rank != (layout.pp > 1):
            continue
        base = replace(layout, strategy=name, shard=fixed.get("shard"), balance=fixed.get("balance", "uniform"))
        if info.shards == "node" and (base.shards in (1, layout.dp) or layout.dp % base.shards):
            continue
        for schedule in ([typed] if typed else _SCHEDULES) if info.stage_per_rank else ["gpipe"]:
            usual = _PER_RANK if SCHEDULES[schedule].looped else (1,)
            for per_rank in [stages] if stages and info.stage_per_rank else usual:
                laid = replace(base, schedule=schedule, stages_per_rank=per_rank)
                if allowed(layers, laid):
                    kinds = [fixed["recompute"]] if "recompute" in fixed else ("none", "full")
                    yield from (replace(laid, recompute=kind) for kind in kinds)


def allowed(layers: Works, layout: PlannedLayout) -> bool:
    """Return whether there are layers and micro-batches enough for the pipeline."""
    if layout.counts and (len(layout.counts) != layout.pp * layout.per_rank or sum(layout.counts) != len(layers)):
        return False
    if layout.pp == 1:
        return True
    several = layout.per_rank == 1 or SCHEDULES[layout.schedule].looped
    filled = layout.chunks >= layout.pp or (layout.pp <= _SHORT and layout.schedule != "1f1b")  # else ranks mostly wait
    enough = layout.pp * layout.per_rank <= len(layers) and filled
    return several and enough and has_equal_rounds(layout.schedule, layout.pp, layout.chunks)


def divisors(number: int) -> list[int]:
    """Return what divides a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
