"""The division of layers into stages according to ``parallel.balance``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

from common.errors import PlanError
from models.chain import ONE_LAYER

T = TypeVar("T")


def partition_layers(
    names: Sequence[str], stages: int, balance: str | Sequence[int], costs: Sequence[int]
) -> list[list[str]]:
    """Cut the layers into stages. Raises PlanError."""
    if stages > len(names) == 1:
        raise PlanError(f"{stages} stages (parallel.pp x stages_per_rank) need as many layers, and {ONE_LAYER}")
    if stages > len(names):
        raise PlanError(
            f"{stages} stages (parallel.pp x stages_per_rank) but only {len(names)} layers: {', '.join(names)}; "
            f"set parallel.pp={len(names)} or less; with stages_per_rank, their product is at most {len(names)}"
        )
    if balance in ("uniform", "time"):  # times are not measured yet
        counts = even_split(len(names), stages)
    elif balance == "size":
        counts = block_partition(costs, stages)
    elif isinstance(balance, str | int | None):
        raise PlanError(
            f"parallel.balance={balance} is not known; choose uniform, time, size, or the layers of each stage, such "
            f"as parallel.balance={_example(len(names), stages)}"
        )
    else:
        counts = _explicit(list(balance), len(names), stages)
    return [list(stage) for stage in blocks(names, counts)]


def blocks(items: Sequence[T], counts: Sequence[int]) -> list[Sequence[T]]:
    """Cut a sequence into blocks of ``counts`` items."""
    return [items[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def even_split(layers: int, stages: int) -> list[int]:
    """Return equal numbers of layers for each stage; the first stages get one more layer if some remain."""
    each, extra = divmod(layers, stages)
    return [each + (i < extra) for i in range(stages)]


def block_partition(costs: Sequence[float], parts: int) -> list[int]:
    """Return the lengths of contiguous non-empty blocks of ``costs`` that minimize the largest sum of a block.

    The result is exact. It is found by dynamic programming in O(parts x n^2).
    """
    n, total = len(costs), [*accumulate(costs, initial=0.0)]
    best = {(0, 0): (0.0, [])}  # (blocks used, layers used) -> (largest sum, lengths)
    for block in range(1, parts + 1):
        for end in range(block, n - (parts - block) + 1):
            best[block, end] = min(
                (max(best[block - 1, start][0], total[end] - total[start]), [*best[block - 1, start][1], end - start])
                for start in range(block - 1, end)
                if (block - 1, start) in best
            )
    return best[parts, n][1]


def _explicit(counts: list[int], layers: int, stages: int) -> list[int]:
    valid = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts)
    if not valid or len(counts) != stages or sum(counts) != layers:
        shown = str(counts).replace(" ", "")
        raise PlanError(
            f"parallel.balance={shown} must be {stages} whole numbers above 0 (one per stage) with the sum {layers} "
            f"(the model's layers); for example parallel.balance={_example(layers, stages)}"
        )
    return counts


def _example(layers: int, stages: int) -> str:
    return str(even_split(layers, stages)).replace(" ", "")
