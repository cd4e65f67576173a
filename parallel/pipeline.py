"""Stages on ranks of their own, under a schedule of torch.distributed.pipelining.

What goes wrong in that package, and what is done about it here:
* Without static metadata the first step runs each stage on uninitialised memory: shapes and dtypes at stage borders
  come from ``stage_borders``.
* It averages gradients over chunks by dividing, also those that were there before: ``scale_grads`` is off, the loss
  carries its own factor, and gradients are cleared before an evaluation.
* The loss exists on the last stage only: it goes to every rank in the step's all-reduce.
* Outputs of the last stage are collected unless told otherwise: the stage gives its loss, and nothing is collected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from data.batch import Batch
from models.chain import Chain
from parallel.averaging import Buckets, averaging
from parallel.mesh import Mesh
from parallel.order import StageSeconds, stage_seconds
from parallel.pipe_stage import PipeStage, PlannedSchedule
from parallel.plan import Plan, StagePlan
from parallel.schedules import SCHEDULES, schedule_class
from parallel.shape_inference import TensorSpec, stage_borders
from parallel.stage import Stage
from parallel.strategy import Options, StepResult, Strategy

# After so many steps, the warm-up among them, a planned order is planned anew for the times measured.
MEASURED_STEPS = 4


class Pipeline(Strategy):
    """A pipeline of stages, with or without replicas of it: ``pipelined``, ``pipe_ddp`` and ``pipe_fsdp``."""

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        mesh: Mesh,
        devices: Sequence[torch.device],
        options: Options,
        sample: Batch,
    ) -> None:
        """Place the stages and make the schedule. The arguments are those of ``Strategy``."""
        super().__init__(plan, chain, mesh, devices, options, sample)
        borders = stage_borders(self.plan, self.chain, sample)
        self._buckets = self._make_buckets()
        self._pipe_stages = [
            self._pipe_stage(stage, plan, borders)
            for stage, plan in zip(self.stages, self.plan.stages_of(self.mesh.position), strict=True)
        ]
        self._schedule = schedule_class(self.plan.schedule)(
            self._pipe_stages if SCHEDULES[self.plan.schedule].looped else self._pipe_stages[0],
            self.plan.chunks,
            loss_fn=_already_a_loss,
            scale_grads=False,
        )

    def replicate(self, stage: Stage) -> nn.Module:
        """See ``Strategy.replicate``. A stage whose backward is split has its gradients averaged by ``Buckets``."""
        return stage if stage in self._buckets else super().replicate(stage)

    def _make_buckets(self) -> dict[Stage, Buckets]:
        splits = SCHEDULES[self.plan.schedule].splits_backward
        if not splits or self.mesh.dp_group is None or self.sharding is not None:
            return {}
        average = averaging(self.mesh, self.options.comm_hook)
        return {stage: Buckets(stage.parameters(), average, self.options.bucket_mb) for stage in self.stages}

    def _pipe_stage(self, stage: Stage, plan: StagePlan, borders: Sequence[Sequence[TensorSpec]]) -> PipeStage:
        ranks = self.mesh.pipeline(self.mesh.replica)
        return PipeStage(
            self.timeline,
            self.replicate(stage),
            plan.index,
            len(self.plan.stages),
            self.device,
            group=self.mesh.pp_group,
            neighbours=(ranks[(plan.index - 1) % len(ranks)], ranks[(plan.index + 1) % len(ranks)]),
            received=[_example(stage, spec, sent=plan.index > 0) for spec in borders[plan.index]],
            sent=[_example(stage, spec, sent=True) for spec in borders[plan.index + 1]],
            reduce=self._buckets[stage].start if stage in self._buckets else None,
        )

    def train_step(self, batch: Batch, step: int, stop: bool = False, loss_limit: float = math.inf) -> StepResult:
        """See ``Strategy.train_step``."""
        with self.step(batch, step) as batch:
            if self.sharding is not None:
                self.sharding.hold_gradients(self.stages)
            self._schedule.step(*self._inputs(batch), return_outputs=False, **self._arguments(batch))
        for buckets in self._buckets.values():
            buckets.wait()
        result = self.finish_step(batch, stop, loss_limit)
        if isinstance(self._schedule, PlannedSchedule):
            self._plan_anew()
        return result

    def eval_step(self, batch: Batch) -> Tensor:
        """See ``Strategy.eval_step``."""
        with self.step(batch) as batch:
            self._schedule.eval(*self._inputs(batch), return_outputs=False, **self._arguments(batch))
        return self.take_sums()

    def _inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return batch.input_tensors if self.mesh.position == 0 else ()

    def _arguments(self, batch: Batch) -> dict[str, Tensor]:
        samples = self.samples_of(batch)
        arguments = {"samples": samples, "target": samples}
        if any(stage.ends_chain for stage in self.stages):
            arguments["targets"] = batch.targets
            if batch.weights is not None:
                arguments["weights"] = batch.weights
        return arguments

    def _plan_anew(self) -> None:
        if len(self.timeline.steps) != MEASURED_STEPS:
            return
        measured = self.mesh.gather(list(stage_seconds(list(self.timeline.steps)).items()))
        seconds = {stage: StageSeconds(*times) for of_rank in measured for stage, times in of_rank}
        self._schedule.plan([seconds[stage] for stage in range(len(self.plan.stages))])

    def close(self) -> None:
        """See ``Strategy.close``."""
        self._pipe_stages.clear()
        self._buckets.clear()
        self._schedule = None
        super().close()


def _already_a_loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage gives its loss; torch's schedules want a function and a target all the same."""
    return output


def _example(stage: Stage, spec: TensorSpec, sent: bool) -> Tensor:
    """A tensor without memory: one of the batch's inputs, or one that is sent between stages."""
    example = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    return stage.as_sent(example).requires_grad_(spec.gradient) if sent else example
