"""The search for the fastest layout that fits, among all layouts that a model, a batch and devices allow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple

from common.errors import PlanError
from parallel.axes import known_axes
from parallel.layout import Layout
from parallel.schedules import SCHEDULES, has_equal_rounds
from parallel.strategies import STRATEGIES
from planner.balance import equal_stages
from planner.costs import Costs
from planner.layout import PlannedLayout, nodes_for
from planner.memory import Allocation, Memory, Rank, fullest
from planner.step import Seconds, seconds_of, seconds_of_layer
from planner.work import Works

FREE = (*Layout.DEGREES, "chunks", "schedule", "stages_per_rank")  # keys that are fixed if the user types them
_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble")
_SHORT = 4  # the longest pipeline that may be fast with fewer micro-batches than ranks
_PER_RANK = (2, 4)  # stages per rank to try, for schedules with several stages per rank
_equal_stages = cache(equal_stages)  # layouts that differ only in other keys have the same costs


class Pool(NamedTuple):
    """A set of devices.

    Attributes:
        per_node: The number of devices per node.
        devices: The total number of devices.
        whole: Whether a layout must use all devices. If not, it may use fewer.
    """

    per_node: int
    devices: int
    whole: bool = False


@dataclass(frozen=True)
class Devices:
    """The devices on which layouts may run.

    Attributes:
        costs: The seconds of each kind of work on these devices.
        count: The number of devices.
        memory: Bytes per device.
        allocation: The quantities on which memory depends.
        states: The average number of optimizer states per trained parameter.
    """

    costs: Costs
    count: int
    memory: float
    allocation: Allocation
    states: float = 2


@dataclass(frozen=True)
class Candidate:
    """A layout with its predicted seconds and memory."""

    layers: Works
    layout: PlannedLayout
    devices: Devices

    @cached_property
    def memory(self) -> Memory:
        """The memory of the layout's fullest rank."""
        return fullest(self.layers, self.layout, self.devices.allocation, self.devices.states)

    @cached_property
    def seconds(self) -> Seconds:
        """The parts of a step in seconds."""
        return seconds_of(self.layers, self.layout, self.devices.costs)

    @property
    def missing(self) -> float:
        """The bytes by which the fullest rank exceeds a device's memory; at most 0 if it fits."""
        return self.memory.total - self.devices.memory

    @property
    def name(self) -> str:
        """The layout in a few words."""
        return self.layout.name


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        best: The candidates that fit, the fastest first.
        tried: The number of layouts that were tried.
        nearest: For each strategy without a candidate that fits, the candidate with the least memory.
    """

    best: list[Candidate]
    tried: int
    nearest: dict[str, Candidate]


def search(layers: Works, kinds: Iterable[tuple[Devices, Iterable[PlannedLayout]]]) -> Found:
    """Predict the seconds of layouts, and sort the layouts that fit by their seconds.

    Args:
        layers: The layers' work.
        kinds: Sets of devices (several numbers of processes of this machine, or a cluster), each with its layouts.

    Raises:
        PlanError: If no layout fits. The message names the nearest layout and the memory that it lacks.
    """
    fit, nearest, tried = [], {}, 0
    for devices, possible in kinds:
        for layout in possible:
            tried += 1
            candidate = Candidate(layers, _balanced(layers, layout, devices), devices)
            if candidate.missing <= 0:
                fit.append(candidate)
            elif layout.strategy not in nearest or candidate.missing < nearest[layout.strategy].missing:
                nearest[layout.strategy] = candidate
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


def _balanced(layers: Works, layout: PlannedLayout, devices: Devices) -> PlannedLayout:
    """Give a pipeline the stages that ``parallel.balance=time`` or ``size`` will make, by predicted costs."""
    if layout.balance not in ("time", "size") or not layout.pipelined:
        return layout
    if layout.balance == "time":
        costs = [seconds_of_layer(work, layout, devices.costs) for work in layers]
    else:
        costs = Rank(layers, layout, devices.allocation, devices.states).each_layer()
    return replace(layout, balance=tuple(_equal_stages(tuple(costs), layout.pp * layout.per_rank)))


def layouts(
    layers: Works, batch: int, pool: Pool, divided: Sequence[Mapping[str, Any]] = ({},),
    fixed: Mapping[str, Any] | None = None, least: int = 1,
) -> Iterator[PlannedLayout]:  # fmt: skip
    """Yield the layouts that a model, a batch and devices allow.

    Args:
        layers: The layers' work.
        batch: The number of samples per step.
        pool: The devices.
        divided: The ways in which ranks may divide stages: keys of a layout, besides ``dp`` and ``pp``.
        fixed: The given values of keys of ``FREE``, and of strategy, shard, reshard, balance and recompute.
        least: The number of samples of the smallest micro-batch that the layers accept.
    """
    (per_node, devices, whole), fixed = pool, fixed or {}

    def numbers(key: str, usual: Sequence[int], possible: Sequence[int]) -> Sequence[int]:
        return [n for n in possible if n == fixed[key]] if key in fixed else usual

    for keys in divided:
        ranks, typed = Layout(**keys).ranks_per_stage, len(divided) == 1
        own = prod(n for *_, n in keys.get("axes", ()))  # ranks along typed axes
        if not typed and min(per_node, devices) % (ranks // own):
            continue
        for pp in numbers("pp", divisors(devices // ranks), range(1, devices // ranks + 1)):
            possible = [n for n in divisors(batch) if n * ranks * pp <= devices]
            possible = [n for n in possible if n * ranks * pp % nodes_for(n * ranks * pp, per_node) == 0]
            for dp in numbers("dp", sorted({*possible[:1], *possible[-1:]}), possible):
                for chunks in numbers("chunks", cuts := divisors(batch // dp), cuts):
                    samples = batch // dp // chunks
                    if samples >= least and (not whole or dp * ranks * pp == devices):
                        layout = PlannedLayout(dp=dp, pp=pp, chunks=chunks, samples=samples, node=per_node, **keys)
                        yield from _strategies(layers, layout, fixed)


def _strategies(layers: Works, layout: PlannedLayout, fixed: Mapping[str, Any]) -> Iterator[PlannedLayout]:
    for name, info in STRATEGIES.items():
        typed, stages = fixed.get("schedule"), fixed.get("stages_per_rank")
        piped = info.stage_per_rank or not (typed or stages)  # otherwise the typed keys have no meaning
        # Another strategy with replicas has the same layouts as one for an axis of replicas.
        different = not info.several_devices and not (info.degree and info.replicas)
        wanted = fixed["strategy"] == name if "strategy" in fixed else piped and different
        if not wanted or not all(axis.allows(info, layout) for axis in known_axes(layout)):
            continue
        base = replace(
            layout, strategy=name, shard=fixed.get("shard"), reshard=fixed.get("reshard"),
            balance=fixed.get("balance", "uniform"),
        )  # fmt: skip
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
    """Return whether the pipeline has enough layers and micro-batches."""
    if layout.counts and (len(layout.counts) != layout.pp * layout.per_rank or sum(layout.counts) != len(layers)):
        return False
    if layout.pp == 1:
        return True
    several = layout.per_rank == 1 or SCHEDULES[layout.schedule].looped
    filled = layout.chunks >= layout.pp or (layout.pp <= _SHORT and layout.schedule != "1f1b")  # else ranks mostly wait
    enough = layout.pp * layout.per_rank <= len(layers) and filled
    return several and enough and has_equal_rounds(layout.schedule, layout.pp, layout.chunks)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]
