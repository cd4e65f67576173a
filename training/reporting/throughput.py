"""How long optimizer steps take once the run has warmed up."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Sequence


class StepTimes:
    """The duration in seconds of every step of this process."""

    def __init__(self):
        self._seconds = array("d")

    def __len__(self) -> int:
        """The number of steps added."""
        return len(self._seconds)

    def add(self, seconds: float) -> None:
        """Note one step that took `seconds`."""
        self._seconds.append(seconds)

    def median_after_warmup(self) -> float | None:
        """Median seconds per step without the warm-up; None before the first step."""
        kept = after_warmup(self._seconds)
        return statistics.median(kept) if kept else None


def after_warmup(seconds: Sequence[float]) -> Sequence[float]:
    """``seconds`` of each step, in order, without those of the warm-up (compilation, allocator, caches).

    That is the first 2 steps or the first tenth, whichever is longer. Fewer than 4 steps are all kept, as nothing
    would be left to judge by.
    """
    steps = len(seconds)
    return seconds[max(2, steps // 10) if steps >= 4 else 0 :]
