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
class Place:
    """Where layouts may run.

    Attributes:
        costs: What it takes there.
        devices: How many there are.
        memory: Bytes of each.
        allocation: What it takes of them beside tensors.
        states: Tensors that the optimizer keeps for each parameter.
        whole: Whether a layout must take all devices; else it may leave some to others where its strategy takes fewer.
    """

    costs: Costs
    devices: int
    memory: float
    allocation: Allocation
    states: int = 2
    whole: bool = False


@dataclass(frozen=True)
class Candidate:
    """A layout of some layers in a place, and what is predicted of it."""

    works: Works
    layout: PlannedLayout
    place: Place

    @cached_property
    def memory(self) -> Memory:
        """What its fullest rank holds."""
        return fullest(self.works, self.layout, self.place.allocation, self.place.states)

    @cached_property
    def seconds(self) -> Seconds:
        """What a step takes."""
        return seconds_of(self.works, self.layout, self.place.costs)

    @property
    def missing(self) -> float:
        """The bytes that a device lacks for it; at most 0 where it fits."""
        return self.memory.total - self.place.memory

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
    works: Works,
    batch: int,
    places: Sequence[Place],
    tensor: bool = False,
    fixed: Mapping[str, Any] | None = None,
    least: int = 1,
) -> Found:
    """Predict every layout of some places.

    Args:
        works: The layers' work.
        batch: Samples of a step.
        places: The places.
        tensor: Whether layers may be cut (tensor parallelism).
        fixed: What is given of ``FREE``; and "strategy", "shard", "balance" and "recompute", as in ``PlannedLayout``.
        least: Samples of the smallest micro-batch that the layers take.

    Raises:
        PlanError: There is no layout at all, or none fits: it says what comes nearest and by how much it misses.
    """
    fit, nearest, tried, fixed = [], {}, 0, fixed or {}
    for place in places:
        for layout in layouts(works, place.costs.devices, batch, place.devices, tensor, fixed, least, place.whole):
            tried += 1
            one = Candidate(works, layout, place)
            if one.missing <= 0:
                fit.append(one)
            elif layout.strategy not in nearest or one.missing < nearest[layout.strategy].missing:
                nearest[layout.strategy] = one
    if not tried:
        typed = ", ".join(f"{key}={value}" for key, value in fixed.items())
        raise PlanError(f"{len(works)} layers and train.global_batch_size={batch} allow no layout here with {typed}")
    if not fit:
        closest = min(nearest.values(), key=lambda one: one.missing)
        raise PlanError(
            f"none of {tried:,} layouts fits into {closest.place.memory / 2**30:.1f} GiB; what comes nearest, "
            f"{' '.join(closest.layout.words())}, needs {closest.memory.total / 2**30:.1f} GiB, "
            f"{closest.missing / 2**30:.1f} more: take more devices, or a smaller model or batch"
        )
    fit.sort(key=lambda one: (one.seconds.total, one.memory.total))
    known = {one.layout.strategy for one in fit}
    return Found(fit, tried, {name: one for name, one in nearest.items() if name not in known})


def layouts(
    works: Works, per_node: int, batch: int, devices: int, tensor: bool, fixed: Mapping[str, Any], least: int = 1,
    whole: bool = False,
) -> Iterator[PlannedLayout]:  # fmt: skip
    """Yield the layouts of ``search``; ``per_node`` devices are in each node, and ``whole`` is as in ``Place``."""

    def numbers(key: str, usual: Sequence[int], possible: Sequence[int]) -> Sequence[int]:
        return [n for n in possible if n == fixed[key]] if key in fixed else usual

    for tp in divisors(min(per_node, devices)) if tensor else [1]:
        for pp in numbers("pp", divisors(devices // tp), range(1, devices // tp + 1)):
            possible = [n for n in divisors(batch) if n * tp * pp <= devices]
            for dp in numbers("dp", sorted({1, possible[-1]}), possible):
                for chunks in numbers("chunks", cuts := divisors(batch // dp), cuts):
                    one = PlannedLayout(
                        dp=dp, tp=tp, pp=pp, chunks=chunks, samples=batch // dp // chunks, node=per_node
                    )
                    if one.samples >= least and (not whole or dp * tp * pp == devices):
                        yield from _strategies(works, one, fixed)


def _strategies(works: Works, one: PlannedLayout, fixed: Mapping[str, Any]) -> Iterator[PlannedLayout]:
    for name, info in STRATEGIES.items():
        typed, stages = fixed.get("schedule"), fixed.get("stages_per_rank")
        piped = info.stage_per_rank or not (typed or stages)  # else what is typed has no meaning
        wanted = fixed["strategy"] == name if "strategy" in fixed else piped and not info.several_devices
        if not wanted or info.replicas != (one.dp > 1) or info.stage_per_rank != (one.pp > 1):
            continue
        base = replace(one, strategy=name, shard=fixed.get("shard"), balance=fixed.get("balance", "uniform"))
        if info.shards == "node" and (base.shards in (1, one.dp) or one.dp % base.shards):
            continue
        for schedule in ([typed] if typed else _SCHEDULES) if info.stage_per_rank else ["gpipe"]:
            usual = _PER_RANK if SCHEDULES[schedule].looped else (1,)
            for per_rank in [stages] if stages and info.stage_per_rank else usual:
                laid = replace(base, schedule=schedule, stages_per_rank=per_rank)
                if allowed(works, laid):
                    kinds = [fixed["recompute"]] if "recompute" in fixed else ("none", "full")
                    yield from (replace(laid, recompute=kind) for kind in kinds)


def allowed(works: Works, one: PlannedLayout) -> bool:
    """Return whether there are layers and micro-batches enough for the pipeline."""
    if one.counts and (len(one.counts) != one.pp * one.per_rank or sum(one.counts) != len(works)):
        return False
    if one.pp == 1:
        return True
    several = one.per_rank == 1 or SCHEDULES[one.schedule].looped
    filled = one.chunks >= one.pp or (one.pp <= _SHORT and one.schedule != "1f1b")  # else ranks mostly wait
    enough = one.pp * one.per_rank <= len(works) and filled
    return several and enough and has_equal_rounds(one.schedule, one.pp, one.chunks)


def divisors(number: int) -> list[int]:
    """Return what divides a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
