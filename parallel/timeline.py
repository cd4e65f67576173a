"""The times of each forward, backward and receive, measured by the rank that runs it."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

KEPT_STEPS = 50
WARM_UP_STEPS = 2

FORWARD, BACKWARD = "forward", "backward"
# The two parts of a split backward: the gradient of the input, for which the previous stage waits, and the gradients of
# the weights, for which no other rank waits.
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
WORK = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
# A receive lasts from its post to the first use of its data, which includes waiting for the neighbor.
RECEIVE_ACTIVATION, RECEIVE_GRADIENT = "receive_activation", "receive_gradient"
RECEIVES = (RECEIVE_ACTIVATION, RECEIVE_GRADIENT)


class Interval(NamedTuple):
    """One piece of work (``WORK``) or one receive, with its times in seconds on this host's monotonic clock."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


Steps = Sequence[Sequence[Interval]]  # of one rank: for each step, oldest first, its intervals


# A time in seconds; on a GPU a CUDA event, because the host cannot know the time yet.
Moment = Any


class Timeline:
    """The intervals of one rank in its newest training steps; ``steps`` has the oldest step first.

    ``measured`` has the time of each stage, by its index, after a planned schedule has computed it from ``steps``.

    On a GPU the intervals are the times of the kernels, not of the host that launches them. Events are recorded between
    the kernels, and read after the host has waited for the step's numbers.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.steps: deque[list[Interval]] = deque(maxlen=KEPT_STEPS)
        self.measured: dict[int, Any] | None = None
        self._on_gpu = device_type == "cuda"
        self._current: list[Interval] | None = None
        self._posted: dict[tuple[str, int, int], Moment] = {}
        self._unread: list[Interval] | None = None

    def now(self) -> Moment:
        """Return the current moment of the device's work."""
        if not self._on_gpu:
            return now()
        import torch  # here, because figures of a timeline are drawn without torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start_step(self) -> None:
        """Start to record a step."""
        self._current = []
        self._posted.clear()

    def end_step(self) -> None:
        """Store the recorded step. On a GPU the step is added to ``steps`` in the next ``waiting``."""
        if self._on_gpu:
            self._unread = self._current
        elif self._current is not None:
            self.steps.append(self._current)
        self._current = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Read the events of the previous step. Inside the block, the host must wait for the device to finish."""
        if not self._unread:
            yield
            return
        last = self.now()
        yield
        end, intervals, self._unread = now(), self._unread, None

        def seconds(event: Moment) -> float:
            return end - event.elapsed_time(last) / 1e3

        self.steps.append([i._replace(start=seconds(i.start), end=seconds(i.end)) for i in intervals])

    def post(self, kind: str, stage: int, microbatch: int) -> None:
        """Record that a receive is posted now. ``begin`` ends the receive."""
        if self._current is not None:
            self._posted[kind, stage, microbatch] = self.now()

    def begin(self, receive: str, stage: int, microbatch: int) -> Moment:
        """Record the start of work, end the posted receive that the work depends on, if any, and return the moment."""
        start = self.now()
        posted = self._posted.pop((receive, stage, microbatch), None)
        if posted is not None and self._current is not None:
            self._current.append(Interval(receive, stage, microbatch, posted, start))
        return start

    def note(self, kind: str, stage: int, microbatch: int, start: Moment) -> None:
        """Record the end of work."""
        if self._current is not None:
            self._current.append(Interval(kind, stage, microbatch, start, self.now()))


class Recording(NamedTuple):
    """A rank's timeline in the form in which it is sent to other ranks: the host's name, and the intervals by step.

    ``mark`` is a time on the rank's clock, taken after a barrier. It is the same moment on all ranks, to within the
    time of a message.
    """

    host: str
    mark: float
    steps: list[list[Interval]]

    @classmethod
    def of(cls, timeline: Timeline | None) -> Recording:
        """Make a rank's recording. All ranks call this when they leave a barrier."""
        return cls(socket.gethostname(), now(), [] if timeline is None else list(timeline.steps))

    @classmethod
    def parse(cls, received: Sequence) -> Recording:
        """Make a recording from its JSON form, which has lists in place of tuples."""
        host, mark, steps = received
        return cls(host, mark, [[Interval(*interval) for interval in step] for step in steps])


def on_one_clock(recordings: Sequence[Recording]) -> list[list[list[Interval]]]:
    """Convert all ranks' times to the clock of rank 0's host.

    The ranks of one host have the same clock. The times of another host are shifted so that the marks coincide, which
    is exact to within about the time of a message.
    """
    marks: dict[str, float] = {}
    for recording in recordings:  # the first rank to leave the barrier was delayed least
        marks[recording.host] = min(recording.mark, marks.get(recording.host, recording.mark))
    ranks = []
    for host, _, steps in recordings:
        ahead = marks[host] - marks[recordings[0].host]
        ranks.append([[i._replace(start=i.start - ahead, end=i.end - ahead) for i in step] for step in steps])
    return ranks


def now() -> float:
    """Return the time in seconds, on a clock that is the same for all processes of a host."""
    return time.perf_counter()


def steady_steps(ranks: Sequence[Steps]) -> range:
    """List the steps that all ranks have recorded, without the warm-up, as indices from the end (-1 is the newest)."""
    count = min(len(steps) for steps in ranks)
    return range((WARM_UP_STEPS if count > WARM_UP_STEPS else 0) - count, 0)


def work_span(intervals: Sequence[Interval]) -> tuple[float, float]:
    """Return the start of the first work among ``intervals`` and the end of the last; 0 if there is none."""
    work = [i for i in intervals if i.kind in WORK]
    return min((i.start for i in work), default=0.0), max((i.end for i in work), default=0.0)


def step_seconds(ranks: Sequence[Steps], index: int) -> float:
    """Return the seconds from a step's first work to its last, over all ranks. ``index`` counts from the end."""
    first, last = work_span([i for steps in ranks for i in steps[index]])
    return last - first


def busy_seconds(ranks: Sequence[Steps]) -> list[float]:
    """Compute each rank's working seconds per step, averaged over the steady steps; 0 if no step was recorded."""
    steps = steady_steps(ranks)
    work = ([i.end - i.start for index in steps for i in own[index] if i.kind in WORK] for own in ranks)
    return [sum(seconds) / max(1, len(steps)) for seconds in work]


def bubble_fraction(ranks: Sequence[Steps]) -> float | None:
    """Compute 1 - busy time / (ranks x span from the first forward to the last backward), over the steady steps.

    The result is None if no step was recorded on every rank.
    """
    steps = steady_steps(ranks)
    span = sum(step_seconds(ranks, index) for index in steps)
    return 1.0 - sum(busy_seconds(ranks)) * len(steps) / (len(ranks) * span) if span else None
