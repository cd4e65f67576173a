"""Stages on ranks of their own, under a schedule of torch.distributed.pipelining: ``pipelined`` and ``pipe_ddp``.

What bites in that package, and what is done about it here:
* without static metadata the first step runs each stage on uninitialised memory: borders come from ``trace``
* it averages gradients over chunks by dividing, also those that were there before: scale_grads is off, the loss
  carries its own factor, gradients are cleared before an evaluation
* the loss exists on the last stage only: it goes to every rank in the step's all-reduce
* outputs of the last stage are collected unless told otherwise: the stage gives its loss, and nothing is collected
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data.batch import Batch
from parallel.pipe_stage import PipeStage
from parallel.planned import SchedulePlanned, stage_seconds
from parallel.schedules import SCHEDULES, schedule_class
from parallel.shape_inference import TensorSpec
from parallel.stage import Stage
from parallel.strategy import StepResult, Strategy

# After so many steps, the warm-up among them, a planned order is planned anew from what they took.
MEASURED_STEPS = 4


class Pipeline(Strategy):
    """``pipelined`` is this with one replica, ``pipe_ddp`` with several."""

    def __init__(self, *args, borders: Sequence[TensorSpec], **kwargs) -> None:
        """``borders``: for each stage of the plan, the tensor it receives, then the loss; one micro-batch each."""
        super().__init__(*args, **kwargs)
        self._pipe_stages = [
            PipeStage(
                self.timeline,
                self._replicate(stage),
                plan.index,
                len(self.plan.stages),
                self.device,
                input_args=_example(stage, borders[plan.index], sent=plan.index > 0),
                output_args=_example(stage, borders[plan.index + 1], sent=True),
                group=self.mesh.pp_group,
            )
            for stage, plan in zip(self.stages, self.plan.stages_of(self.mesh.position), strict=True)
        ]
        looped = SCHEDULES[self.plan.schedule].looped
        self._schedule = schedule_class(self.plan.schedule)(
            self._pipe_stages if looped else self._pipe_stages[0],
            self.plan.chunks,
            loss_fn=_already_a_loss,
            scale_grads=False,
        )

    def train_step(self, *args, **kwargs) -> StepResult:
        result = super().train_step(*args, **kwargs)
        # A GPU's host clock does not see when its kernels run.
        if isinstance(self._schedule, SchedulePlanned) and self.device.type == "cpu":
            self._plan_anew()
        return result

    def _plan_anew(self) -> None:
        if len(self.timeline.steps) != MEASURED_STEPS:
            return
        known = self.mesh.gather(stage_seconds(list(self.timeline.steps)))
        seconds = {stage: times for of_rank in known for stage, times in of_rank.items()}
        self._schedule.plan([seconds[stage] for stage in range(len(self.plan.stages))])

    def _forward_backward(self, batch: Batch) -> None:
        self._run(self._schedule.step, batch)

    def _forward(self, batch: Batch) -> None:
        self._run(self._schedule.eval, batch)

    def _run(self, run, batch: Batch) -> None:
        inputs = [batch.inputs] if self.mesh.position == 0 else []
        extra = {}
        if any(stage.ends_chain for stage in self.stages):
            extra = {"targets": batch.targets}
            if batch.weights is not None:
                extra["weights"] = batch.weights
        indices = self._microbatch_indices()
        run(*inputs, microbatch=indices, target=indices, return_outputs=False, **extra)

    def close(self) -> None:
        self._pipe_stages.clear()
        self._schedule = None
        super().close()


def _already_a_loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage gives its loss; torch's schedules want a function and a target all the same."""
    return output


def _example(stage: Stage, border: TensorSpec, sent: bool) -> Tensor:
    """Without memory: the batch's inputs, or what passes between stages and has a gradient."""
    example = torch.empty(border.shape, dtype=border.dtype, device="meta")
    return stage.as_sent(example).requires_grad_(border.dtype.is_floating_point) if sent else example
