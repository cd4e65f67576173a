"""When each forward and backward ran, measured where it runs."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

KEPT_STEPS = 50


@dataclass
class Interval:
    """One piece of work: ``kind`` "forward" or "backward"; seconds on this host's monotonic clock."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass
class Timeline:
    """The newest steps' intervals of one rank, oldest first."""

    steps: deque[list[Interval]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _current: list[Interval] | None = None

    def start_step(self) -> None:
        self._current = []

    def end_step(self) -> None:
        if self._current is not None:
            self.steps.append(self._current)
        self._current = None

    def note(self, kind: str, stage: int, microbatch: int, start: float) -> None:
        """Work that began at ``start`` (``now()``) ends now. Outside a training step nothing is kept."""
        if self._current is not None:
            self._current.append(Interval(kind, stage, microbatch, start, now()))


def now() -> float:
    """Seconds; the same clock in every process of a host."""
    return time.perf_counter()


def bubble_fraction(ranks: list[list[list[Interval]]]) -> float | None:
    """1 - busy time / (ranks x span from the first forward to the last backward), summed over steps.

    ranks    for each rank of one pipeline, its steps' intervals (``list(timeline.steps)``)
    returns  None where no step was measured on every rank. The first two steps (warm-up) are left out if there are
             more
    """
    count = min(len(steps) for steps in ranks)
    first = 2 if count > 2 else 0
    busy = span = 0.0
    for index in range(first - count, 0):
        intervals = [interval for steps in ranks for interval in steps[index]]
        if not intervals:
            continue
        busy += sum(i.end - i.start for i in intervals)
        span += max(i.end for i in intervals) - min(i.start for i in intervals)
    return 1.0 - busy / (len(ranks) * span) if span else None
