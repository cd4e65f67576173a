"""Stages on separate ranks, under a schedule of torch.distributed.pipelining.

A schedule of that package calls ``loss_fn(output, target)`` on the last rank. Here the last stage computes the loss in
its forward: it gets the targets as keyword arguments and adds up the sums of loss and metrics. The output that the
schedule sees is therefore the loss. The schedule's ``loss_fn`` returns the output unchanged, and its ``target`` is a
placeholder that can be cut into micro-batches. The sums stay in the stage until the step's all-reduce
(``Strategy._agree``) sends them to all ranks.

This module avoids these pitfalls of the package:
* Without static metadata, the first step runs each stage on uninitialized memory. The shapes and dtypes at stage
    borders are therefore given by ``stage_borders``.
* It averages gradients over chunks by dividing them, including earlier gradients. ``scale_grads`` is therefore off, the
  loss contains the factor, and gradients are cleared before an evaluation.
* By default it collects the outputs of the last stage. Here the output is the loss, and nothing is collected.
* A stage sends and receives tensors of one shape only. A set of stages and a schedule are therefore made for each shape
  of micro-batches, at the first step with this shape. Ranks exchange no shapes, since all ranks of a pipeline read the
  same batch. The sets of stages use the same modules, and so the same weights, gradients and DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from data.dataset import Batch
from models.chain import Chain, Tensors
from parallel.axes import axes_of
from parallel.gathering import gathering
from parallel.mesh import Mesh
from parallel.plan import Plan
from parallel.schedules import SCHEDULES
from parallel.shape_inference import on_meta, trace
from parallel.strategy import Options, Strategy
from parallel.timeline import Timeline


class Pipeline(Strategy):
    """A pipeline of stages, with or without replicas: ``pipelined``, ``pipe_ddp`` and ``pipe_fsdp``."""

    timeline: Timeline

    def __init__(
        self, plan: Plan, chain: Chain, mesh: Mesh, devices: Sequence[torch.device], options: Options, sample: Batch
    ) -> None:
        super().__init__(plan, chain, mesh, devices, options, sample)
        self.timeline = Timeline(self.device.type)
        assert plan.schedule is not None  # a pipeline has one
        self._info = SCHEDULES[plan.schedule]
        self._stage_class, self._schedule_class = map(resolve_name, (self._info.stage_class, self._info.class_name))
        self._by_shape: dict[tuple[torch.Size, ...], Any] = {}
        self.prepared(self.part_of(sample))

    def prepared(self, microbatch: Batch) -> Any:
        """Return torch's schedule for micro-batches of the shape of ``microbatch``."""
        shapes = tuple(tensor.shape for tensor in microbatch.input_tensors)
        if shapes not in self._by_shape:
            with gathering(self.plan):  # nothing is sent
                borders = stage_borders(self.plan, self.chain, microbatch)
            stages = [
                self._stage_class(self, stage, module, index, borders[index], borders[index + 1])
                for stage, module, index in zip(self.stages, self.modules, self.indices, strict=True)
            ]
            self._by_shape[shapes] = self._schedule_class(
                stages if self._info.looped else stages[0],
                self.plan.chunks,
                loss_fn=lambda output, target: output,
                scale_grads=False,
            )
        return self._by_shape[shapes]

    def forward_backward(self, batch: Batch) -> None:
        """See ``Strategy.forward_backward``."""
        schedule = self.prepared(batch.chunks(self.plan.chunks)[0])
        self.timeline.start_step()
        schedule.step(*self._inputs(batch), return_outputs=False, **self._arguments(batch))
        self.timeline.end_step()

    def forward(self, batch: Batch) -> None:
        """See ``Strategy.forward``."""
        schedule = self.prepared(batch.chunks(self.plan.chunks)[0])
        schedule.eval(*self._inputs(batch), return_outputs=False, **self._arguments(batch))

    def _inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return batch.input_tensors if self.mesh.position == 0 else ()

    def _arguments(self, batch: Batch) -> dict[str, Tensors]:
        samples = self.samples_of(batch)
        arguments: dict[str, Tensors] = {"samples": samples, "target": samples, **batch.others}
        if not any(stage.ends_chain for stage in self.stages):
            del arguments["targets"]
        return arguments

    def all_sum(self, vector: Tensor) -> list[float]:
        """See ``Strategy.all_sum``. The host waits for the device, so the timeline can read when kernels ran."""
        with self.timeline.waiting():
            return super().all_sum(vector)

    def close(self) -> None:
        """See ``Strategy.close``."""
        self._by_shape.clear()
        super().close()


@torch.enable_grad()
def stage_borders(plan: Plan, chain: Chain, sample: Batch) -> list[tuple[Tensor, ...]]:
    """Infer, without memory, the tensors of one micro-batch that stages 0, 1, ... receive, and finally the loss."""
    traces = trace(chain, sample, plan.precision, plan.device_type)
    outputs = {name: traced.outputs for name, traced in zip(chain.names, traces, strict=True)}
    received = tuple(map(on_meta, sample.input_tensors))
    *sent, loss = (outputs[stage.layers[-1]] for stage in plan.stages)
    for _, axis in axes_of(plan):
        sent = [tuple(axis.boundary(plan, x) for x in tensors) for tensors in sent]
    return [received, *sent, loss]
