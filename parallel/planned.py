"""A looped schedule that works in the order that ends first: by the textbook's times, then by those measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from parallel.order import UNMEASURED, StageSeconds, best_order
from parallel.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, WARM_UP_STEPS, WORK, Steps


class SchedulePlanned(_PipelineScheduleRuntime):
    """torch adds sends and receives to the order, and runs it."""

    def __init__(self, stages: list[PipelineStage], n_microbatches: int, **kwargs) -> None:
        super().__init__(stages, n_microbatches, **kwargs)
        self.plan([UNMEASURED] * self._num_stages)

    def plan(self, seconds: Sequence[StageSeconds]) -> None:
        """Work in the best order for these times of all stages of the pipeline: between steps, on all its ranks."""
        self.pipeline_order = best_order(seconds, self.pp_group_size, self._n_microbatches)
        self._prepare_schedule_with_comms(self.pipeline_order)


def stage_seconds(steps: Steps) -> dict[int, StageSeconds]:
    """What each of this rank's stages takes: the least in the steps after the warm-up, since what disturbs only adds.
    Of a backward that was only seen in one piece, or only in two parts, the other is estimated."""
    least: dict[tuple[str, int], float] = {}
    for step in steps[WARM_UP_STEPS:]:
        for kind, stage, _, start, end in step:
            if kind in WORK:
                least[kind, stage] = min(end - start, least.get((kind, stage), math.inf))
    return {stage: _seconds(least, stage) for stage in sorted({stage for _, stage in least})}


def _seconds(least: dict[tuple[str, int], float], stage: int) -> StageSeconds:
    forward, backward, inputs, weights = (
        least.get((kind, stage)) for kind in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    dearer = (UNMEASURED.inputs + UNMEASURED.weights) / UNMEASURED.backward
    if backward is None:
        backward = (inputs + weights) / dearer
    if inputs is None:
        inputs = backward * UNMEASURED.inputs / UNMEASURED.backward
        weights = backward * UNMEASURED.weights / UNMEASURED.backward
    return StageSeconds(forward, backward, inputs, weights)
