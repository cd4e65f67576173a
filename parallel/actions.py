"""The pieces of work in a pipeline, and their seconds. Their orders: ``schedules`` (torch's), ``zero_bubble.order``."""

from __future__ import annotations

import math
from typing import NamedTuple

from parallel.timeline import WARM_UP_STEPS, WORK, Steps


class Action(NamedTuple):
    """One piece of a rank's work (``parallel.timeline.WORK``): the stage, the kind, and the replica's micro-batch."""

    stage: int
    kind: str
    microbatch: int


Orders = dict[int, list[Action]]  # rank -> its actions, in order


class StageSeconds(NamedTuple):
    """The seconds of a micro-batch in a stage, in the order of ``parallel.timeline.WORK``.

    ``inputs`` and ``weights`` are the two parts of a split backward.
    """

    forward: float
    backward: float
    inputs: float
    weights: float

    def of(self, kind: str) -> float:
        """Return the seconds of one kind of ``parallel.timeline.WORK``."""
        return self[WORK.index(kind)]


# The times to use before any are measured: textbook values, and a little more for a split backward.
UNMEASURED = StageSeconds(1.0, 2.0, 1.0, 1.05)


def stage_seconds(steps: Steps) -> dict[int, StageSeconds]:
    """Return the time of each of this rank's stages, by the stage's index.

    The time is the minimum over the steps after the warm-up, since disturbances only add time. If only the whole
    backward or only the split backward was measured, the other time is estimated.
    """
    least: dict[tuple[str, int], float] = {}
    for step in steps[WARM_UP_STEPS:]:
        for kind, stage, _, start, end in step:
            if kind in WORK:
                least[kind, stage] = min(end - start, least.get((kind, stage), math.inf))
    found = {}
    for stage in sorted({stage for _, stage in least}):
        forward, backward, inputs, weights = (least.get((kind, stage), math.inf) for kind in WORK)
        if backward == math.inf:
            backward = (inputs + weights) * UNMEASURED.backward / (UNMEASURED.inputs + UNMEASURED.weights)
        if inputs == math.inf:
            inputs, weights = (backward * part / UNMEASURED.backward for part in UNMEASURED[2:])
        found[stage] = StageSeconds(forward, backward, inputs, weights)
    return found
