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

from collections.abc import Sequence
from pkgutil import resolve_name

import torch
from torch import Tensor

from data.dataset import Batch
from models.chain import Chain
from parallel.mesh import Mesh
from parallel.plan import Plan
from parallel.schedules import SCHEDULES
from parallel.shape_inference import stage_borders
from parallel.strategy import Options, Strategy
from parallel.timeline import Timeline


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
        super().__init__(plan, chain, mesh, devices, options, sample)
        self.timeline = Timeline(self.device.type)
        borders = stage_borders(plan, chain, sample)
        schedule = SCHEDULES[plan.schedule]
        stage_class, schedule_class = resolve_name(schedule.stage_class), resolve_name(schedule.class_name)
        self._pipe_stages = [
            stage_class(self, stage, index, borders[index], borders[index + 1])
            for stage, index in zip(self.stages, self.indices, strict=True)
        ]
        self._schedule = schedule_class(
            self._pipe_stages if schedule.looped else self._pipe_stages[0],
            plan.chunks,
            loss_fn=_already_a_loss,
            scale_grads=False,
        )

    def forward_backward(self, batch: Batch) -> None:
        """See ``Strategy.forward_backward``."""
        self.timeline.start_step()
        self._schedule.step(*self._inputs(batch), return_outputs=False, **self._arguments(batch))
        for stage in self._pipe_stages:
            stage.wait()
        self.timeline.end_step()

    def forward(self, batch: Batch) -> None:
        """See ``Strategy.forward``."""
        self._schedule.eval(*self._inputs(batch), return_outputs=False, **self._arguments(batch))

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

    def all_sum(self, vector: Tensor) -> list[float]:
        """See ``Strategy.all_sum``. The host waits for the device, so the timeline can read when kernels ran."""
        with self.timeline.waiting():
            return super().all_sum(vector)

    def close(self) -> None:
        """See ``Strategy.close``."""
        self._pipe_stages.clear()
        self._schedule = None
        super().close()


def _already_a_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the last stage's output, which is its loss: torch's schedules want a function and a target anyway."""
    return output
