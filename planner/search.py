"""Every layout that a model, a batch and a number of devices allow, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import PlanError
from parallel.schedules import SCHEDULES, has_equal_rounds
from parallel.strategies import STRATEGIES
from planner.costs import PaperCosts
from planner.step import Bytes, Layout, Seconds, Works, bytes_of, seconds_of

FREE = ("dp", "tp", "pp", "chunks", "schedule", "stages_per_rank")  # what may be typed, and is fixed then
_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble")
_PER_RANK = (2, 4)  # stages of a rank, of schedules that take several


@dataclass(frozen=True)
class Candidate:
    """A layout and what is predicted of it."""

    layout: Layout
    memory: Bytes
    seconds: Seconds

    @property
    def words(self) -> list[str]:
        """What is typed for it; tensor parallelism, which is planned on paper only, comes last."""
        one, info = self.layout, STRATEGIES[self.layout.strategy]
        words = [f"parallel={one.strategy}"]
        words += [f"parallel.dp={one.dp}"] if info.replicas else []
        words += [f"parallel.pp={one.pp}", f"parallel.schedule={one.schedule}"] if info.stage_per_rank else []
        words += [f"parallel.stages_per_rank={one.per_rank}"] if one.per_rank > 1 else []
        words += [f"parallel.chunks={one.chunks}"]
        words += ["train.activation_checkpointing=true"] if one.recompute == "full" else []
        return words + ([f"tp={one.tp}"] if one.tp > 1 else [])


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
    costs: PaperCosts,
    batch: int,
    devices: int,
    memory: float,
    reserved: float = 0.0,
    tensor: bool = False,
    fixed: Mapping[str, Any] | None = None,
    microbatch: int | None = None,
) -> Found:
    """Predict every layout on ``devices`` or, where a strategy takes fewer, on as many as it takes.

    Args:
        works: The layers' work.
        costs: What it takes.
        batch: Samples of a step.
        devices: How many there are.
        memory: Bytes of each.
        reserved: Bytes of each that no tensor gets.
        tensor: Whether layers may be cut (tensor parallelism).
        fixed: What was typed of ``FREE``, and "strategy".
        microbatch: Samples of a micro-batch, where another number would be felt (BatchNorm).

    Raises:
        PlanError: There is no layout at all, or none fits: it says what comes nearest and by how much it misses.
    """
    fit, nearest, tried = [], {}, 0
    for layout in layouts(works, costs.devices, batch, devices, tensor, fixed or {}, microbatch):
        tried += 1
        needed = bytes_of(works, layout, costs, reserved)
        if needed.total > memory:
            known = nearest.get(layout.strategy)
            if known is None or needed.total < known.memory.total:
                nearest[layout.strategy] = Candidate(layout, needed, seconds_of(works, layout, costs))
        else:
            fit.append(Candidate(layout, needed, seconds_of(works, layout, costs)))
    typed = " ".join(f"{key}={value}" for key, value in (fixed or {}).items())
    if not tried:
        raise PlanError(
            f"train.global_batch_size={batch} and {len(works)} layers on {devices} devices allow no layout"
            + (f" with {typed}; leave some of that out" if typed else "; choose a batch that more numbers divide")
        )
    if not fit:
        least = min(nearest.values(), key=lambda one: one.memory.total)
        raise PlanError(
            f"none of {tried:,} layouts fits into {memory / 2**30:.1f} GiB; what comes nearest, "
            f"{' '.join(least.words)}, needs {least.memory.total / 2**30:.1f} GiB, "
            f"{(least.memory.total - memory) / 2**30:.1f} more: take more devices, or a smaller model or batch"
        )
    fit.sort(key=lambda one: (one.seconds.total, one.memory.total))
    known = {one.layout.strategy for one in fit}
    return Found(fit, tried, {name: one for name, one in nearest.items() if name not in known})


def layouts(
    works: Works,
    per_node: int,
    batch: int,
    devices: int,
    tensor: bool,
    fixed: Mapping[str, Any],
    microbatch: int | None = None,
) -> Iterator[Layout]:
    """Yield the layouts of ``search``; ``per_node`` devices are in each node."""

    def numbers(key: str, choices: Sequence[int]) -> Sequence[int]:
        return [n for n in choices if fixed.get(key) in (None, n)]

    for tp in numbers("tp", divisors(min(per_node, devices)) if tensor else [1]):
        for pp in numbers("pp", divisors(devices // tp)):
            for dp in numbers("dp", sorted({1, devices // (tp * pp)})):
                if batch % dp:
                    continue
                for chunks in numbers("chunks", divisors(batch // dp)):
                    samples = batch // dp // chunks
                    if microbatch in (None, samples):
                        one = Layout(dp=dp, tp=tp, pp=pp, chunks=chunks, samples=samples)
                        yield from _strategies(works, one, per_node, fixed)


def _strategies(works: Works, one: Layout, per_node: int, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    for name, info in STRATEGIES.items():
        wanted = fixed.get("strategy") in (None, name)
        if not wanted or info.several_devices or info.replicas != (one.dp > 1) or info.stage_per_rank != (one.pp > 1):
            continue
        shards = {"": 1, "all": one.dp, "node": max(1, per_node // (one.tp * one.pp))}[info.shards]
        if info.shards == "node" and (shards in (1, one.dp) or one.dp % shards):
            continue
        base = replace(one, strategy=name, shards=shards, reshard=not info.stage_per_rank)
        for schedule in _SCHEDULES if info.stage_per_rank else ("gpipe",):
            looped = SCHEDULES[schedule].looped
            for per_rank in _PER_RANK if looped else (1,):
                typed = fixed.get("schedule") in (None, schedule) and fixed.get("stages_per_rank") in (None, per_rank)
                laid = replace(base, schedule=schedule, per_rank=per_rank)
                if typed and allowed(works, laid):
                    yield laid
                    yield replace(laid, recompute="full")


def allowed(works: Works, one: Layout) -> bool:
    """Return whether there are layers and micro-batches enough for the pipeline."""
    if one.pp == 1:
        return True
    enough = one.pp * one.per_rank <= len(works) and one.chunks >= one.pp
    return enough and has_equal_rounds(one.schedule, one.pp, one.chunks)


def divisors(number: int) -> list[int]:
    """Return what divides a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
