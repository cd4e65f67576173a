"""Orders of a pipeline's work: torch's interleaved 1F1B, and how long one takes."""

from collections.abc import Sequence

from parallel.actions import UNMEASURED, Orders, StageSeconds
from parallel.timeline import work_span
from planner.simulation import order, replay


def interleaved(ranks: int, per_rank: int, chunks: int) -> Orders:
    """torch's order."""
    return order([UNMEASURED] * (ranks * per_rank), ranks, chunks, "interleaved_1f1b")


def span(orders: Orders, seconds: Sequence[StageSeconds]) -> float:
    """How long all takes, every action as early as its rank and what it needs let it be."""
    return work_span([i for done in replay(orders, seconds).values() for i in done])[1]
