"""When each forward, backward and receive ran, measured where it runs."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KEPT_STEPS = 50
WARM_UP_STEPS = 2

FORWARD, BACKWARD = "forward", "backward"
# The two halves of a backward, where a schedule runs them apart: the gradient of the input, which the stage before
# waits for, and those of the weights, for which nobody waits.
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
WORK = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
# From when the receive was posted to when its data was used: waiting until the neighbour has it is in there too.
RECEIVE_ACTIVATION, RECEIVE_GRADIENT = "receive_activation", "receive_gradient"


class Interval(NamedTuple):
    """One piece of work, of a kind in ``WORK``, or one receive; seconds on this host's monotonic clock."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


Steps = Sequence[Sequence[Interval]]  # of one rank: for each step, oldest first, its intervals


@dataclass
class Timeline:
    """The newest steps' intervals of one rank, oldest first. Outside a training step nothing is kept."""

    steps: deque[list[Interval]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _current: list[Interval] | None = None
    _posted: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def start_step(self) -> None:
        self._current = []
        self._posted.clear()

    def end_step(self) -> None:
        if self._current is not None:
            self.steps.append(self._current)
        self._current = None

    def post(self, kind: str, stage: int, microbatch: int) -> None:
        """A receive that ``begin`` will use is posted now."""
        if self._current is not None:
            self._posted[kind, stage, microbatch] = now()

    def begin(self, receive: str, stage: int, microbatch: int) -> float:
        """Work that uses what the receive of that kind brought, where there was one, starts now; returns ``now()``."""
        start = now()
        posted = self._posted.pop((receive, stage, microbatch), None)
        if posted is not None and self._current is not None:
            self._current.append(Interval(receive, stage, microbatch, posted, start))
        return start

    def note(self, kind: str, stage: int, microbatch: int, start: float) -> None:
        """Work that began at ``start`` (``now()``) ends now."""
        if self._current is not None:
            self._current.append(Interval(kind, stage, microbatch, start, now()))


class Recording(NamedTuple):
    """What a rank has measured, for others to read. ``mark``: an instant on its clock that is the same moment for all
    ranks, give or take a message (just after a barrier)."""

    host: str
    mark: float
    steps: list[list[Interval]]

    @classmethod
    def of(cls, timeline: Timeline) -> Recording:
        """To be called by all ranks as they leave a barrier."""
        return cls(socket.gethostname(), now(), list(timeline.steps))


def on_one_clock(recordings: Sequence[Recording]) -> list[list[list[Interval]]]:
    """Each rank's steps on the clock of rank 0's host.

    The ranks of a host share its clock, and their times stay as they are. Another host's are moved so that the mark
    falls on rank 0's: right to about the time that a message takes.
    """
    marks: dict[str, float] = {}
    for recording in recordings:  # the first to leave the barrier was delayed least
        marks[recording.host] = min(recording.mark, marks.get(recording.host, recording.mark))
    home = recordings[0].host
    ranks = []
    for host, _, steps in recordings:
        ahead = marks[host] - marks[home]
        if ahead:
            steps = [[i._replace(start=i.start - ahead, end=i.end - ahead) for i in step] for step in steps]
        ranks.append(steps)
    return ranks


def now() -> float:
    """Seconds; the same clock in every process of a host."""
    return time.perf_counter()


def steady_steps(ranks: Sequence[Steps]) -> range:
    """The steps that all ranks have measured, as indices from the end (-1: the newest), less the warm-up: the first
    two, if there are more."""
    count = min(len(steps) for steps in ranks)
    return range((WARM_UP_STEPS if count > WARM_UP_STEPS else 0) - count, 0)


def work_span(intervals: Sequence[Interval]) -> tuple[float, float]:
    """When the first work among ``intervals``, which holds some, began, and when the last ended."""
    work = [i for i in intervals if i.kind in WORK]
    return min(i.start for i in work), max(i.end for i in work)


def bubble_fraction(ranks: Sequence[Steps]) -> float | None:
    """1 - busy time / (ranks x span from the first forward to the last backward), summed over the steady steps.

    ranks    for each rank of one pipeline, its steps' intervals (``list(timeline.steps)``)
    returns  None where no step was measured on every rank
    """
    busy = span = 0.0
    for index in steady_steps(ranks):
        work = [i for steps in ranks for i in steps[index] if i.kind in WORK]
        if not work:
            continue
        busy += sum(i.end - i.start for i in work)
        first, last = work_span(work)
        span += last - first
    return 1.0 - busy / (len(ranks) * span) if span else None
