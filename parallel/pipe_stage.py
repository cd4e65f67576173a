"""torch's pipeline stage and schedule, with what this project adds to them.

This is the one file that uses private names of torch.distributed.pipelining: ``_Action``,
``_PipelineScheduleRuntime`` and its ``_prepare_schedule_with_comms``. Tried with torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from models.chain import as_tuple
from parallel.order import UNMEASURED, StageSeconds, best_order
from parallel.precision import outside_autocast
from parallel.split_backward import backward_inputs, backward_weights
from parallel.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    Timeline,
)

_ACTIONS = {
    FORWARD: schedules.FORWARD,
    BACKWARD: schedules.FULL_BACKWARD,
    BACKWARD_INPUT: schedules.BACKWARD_INPUT,
    BACKWARD_WEIGHT: schedules.BACKWARD_WEIGHT,
}


class PipeStage(PipelineStage):
    """A stage that also passes tensors without gradients on, splits its backward well, and records when it works.

    torch's stage knows only those of the tensors at its borders that have a gradient: before torch 2.13 it expects one
    for every tensor that it sends. The others (token numbers, masks) are sent after them, by this class.
    """

    def __init__(
        self,
        timeline: Timeline,
        module: nn.Module,
        index: int,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        neighbours: tuple[int, int],
        received: Sequence[Tensor],
        sent: Sequence[Tensor],
        reduce: Callable[[], None] | None = None,
    ) -> None:
        """Wrap the module of one stage.

        Args:
            timeline: Where forwards, backwards and receives are recorded. Waiting is in the receives only.
            module: The stage, under DistributedDataParallel where there are replicas.
            index: The stage's place in the pipeline, from 0.
            stages: How many stages the pipeline has.
            device: The device of the stage.
            group: The ranks of the pipeline.
            neighbours: The global ranks that run the stages before and after.
            received: One micro-batch's incoming tensors, on the meta device, in the layout in which they are sent. Of
                stage 0, the batch's inputs.
            sent: The same of the outgoing tensors; of the last stage, the loss.
            reduce: Called when the gradients of all micro-batches are there, while other stages still compute.
        """
        first, last = index == 0, index == stages - 1
        self._constants_in = [] if first else [i for i, tensor in enumerate(received) if not tensor.requires_grad]
        self._constants_out = [] if last else [i for i, tensor in enumerate(sent) if not tensor.requires_grad]
        super().__init__(
            module,
            index,
            stages,
            device,
            input_args=_without(received, self._constants_in),
            output_args=_without(sent, self._constants_out),
            group=group,
        )
        self._timeline, self._neighbours, self._reduce = timeline, neighbours, reduce
        self._examples = [received[i] for i in self._constants_in]
        # Tensors without gradients, by micro-batch: those that arrive, and those to be sent.
        self._arriving: dict[int, list[Tensor]] = {}
        self._leaving: dict[int, list[Tensor]] = {}
        self._microbatch = 0

    # -- what crosses the borders ----------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's activations."""
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        if self._examples:
            tensors = [torch.empty_like(example, device=self.device) for example in self._examples]
            self._arriving[fwd_chunk_id] = tensors
            operations = [*operations, *self._operations(dist.irecv, tensors, self._neighbours[0])]
        return self._posted(RECEIVE_ACTIVATION, fwd_chunk_id, operations)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a micro-batch's activations."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        if self._constants_out:
            tensors = self._leaving.pop(fwd_chunk_id)
            operations = [*operations, *self._operations(dist.isend, tensors, self._neighbours[1])]
        return operations

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of the gradients of what this stage has sent."""
        return self._posted(RECEIVE_GRADIENT, bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def _operations(self, kind, tensors: Iterable[Tensor], peer: int) -> list[dist.P2POp]:
        return [dist.P2POp(kind, tensor, peer, self.group) for tensor in tensors]

    def _posted(self, kind: str, microbatch: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        if operations:
            self._timeline.post(kind, self.stage_index, microbatch)
        return operations

    # -- computation -----------------------------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        """Compute a micro-batch's forward, and record when."""
        start = self._timeline.begin(RECEIVE_ACTIVATION, self.stage_index, fwd_chunk_id)
        self._microbatch = fwd_chunk_id
        output = _unwrapped(super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)
        self._timeline.note(FORWARD, self.stage_index, fwd_chunk_id, start)
        return output

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs):
        """Call the module with all incoming tensors, and hand torch those of its outputs that have gradients."""
        if self._constants_in:
            tensors = list(args)
            for position, tensor in zip(self._constants_in, self._arriving.pop(self._microbatch), strict=True):
                tensors.insert(position, tensor)
            args = tuple(tensors)
        output = super().forward_maybe_with_nosync(*args, **kwargs)
        if not self._constants_out:
            return output
        outputs = as_tuple(output)
        self._leaving[self._microbatch] = [outputs[i] for i in self._constants_out]
        return _without(outputs, self._constants_out)

    def backward_one_chunk(self, bwd_chunk_id: int, loss=None, full_backward: bool = True, last_backward: bool = False):
        """Compute a micro-batch's backward, or its first part, and record when."""
        start = self._timeline.begin(RECEIVE_GRADIENT, self.stage_index, bwd_chunk_id)
        _unwrapped(super().backward_one_chunk, bwd_chunk_id, loss, full_backward, last_backward)
        self._timeline.note(BACKWARD if full_backward else BACKWARD_INPUT, self.stage_index, bwd_chunk_id, start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False):
        """Compute the second part of a split backward, and record when."""
        start = self._timeline.now()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._timeline.note(BACKWARD_WEIGHT, self.stage_index, bwd_chunk_id, start)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce gradients over replicas; called once per step after the stage's last backward, or evaluation."""
        super().perform_reduce_grad(grad_scale_factor)
        if self._reduce is not None and self.has_backward:
            self._reduce()

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False):
        """Compute gradients: "full" for all of them, or "input" and later "weight" for those of inputs and weights.

        A split backward computes the gradients of vectors with those of inputs: a norm and a bias have them at hand
        when they have their input's, and ResNet-50's backward takes 2 % longer than in one piece, not 8 %.
        """
        with outside_autocast(self.device.type):
            return self._backward(backward_type, bwd_kwargs, last_backward)

    def _backward(self, backward_type: str, bwd_kwargs: dict, last_backward: bool):
        if backward_type == "weight":
            backward_weights(bwd_kwargs["param_groups"])
            return (), None
        inputs = bwd_kwargs["input_values"]
        if backward_type == "full":
            gradients, deferred = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        else:
            vectors = [p for p in self.submod.parameters() if p.dim() < 2]
            matrices = [p for p in self.submod.parameters() if p.dim() >= 2]
            outputs, output_grads = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
            gradients, deferred = backward_inputs(outputs, output_grads, [*inputs, *vectors], matrices)
            for vector, gradient in zip(vectors, gradients[len(inputs) :], strict=True):
                if gradient is not None:
                    vector.grad = gradient if vector.grad is None else vector.grad.add_(gradient)
        return tuple(_as_sent(*pair) for pair in zip(inputs, gradients, strict=False)), deferred


def _unwrapped(method: Callable, *args, **kwargs):
    """Call a method of torch's stage; what a layer raises is raised as it is, and not as torch's RuntimeError of it."""
    try:
        return method(*args, **kwargs)
    except RuntimeError as error:
        if error.__cause__ is None or "ailed to run" not in str(error):
            raise
        raised = error.__cause__
    raise raised


def _as_sent(x: Tensor, gradient: Tensor | None) -> Tensor | None:
    """The gradient of input ``x`` as the stage before waits for it, also where ``x`` had no part in the loss."""
    if gradient is not None:
        return gradient.contiguous()
    return torch.zeros_like(x) if isinstance(x, Tensor) and x.requires_grad else None


def _without(tensors: Sequence[Tensor], positions: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(tensor for i, tensor in enumerate(tensors) if i not in positions)


class PlannedSchedule(schedules._PipelineScheduleRuntime):
    """A looped schedule with the shortest simulated makespan: for the textbook's times, then for those measured.

    torch adds sends and receives to the order, and runs it.
    """

    def __init__(self, stages: list[PipelineStage], n_microbatches: int, **kwargs) -> None:
        """Plan for the textbook's times. The arguments are those of torch's schedules."""
        super().__init__(stages, n_microbatches, **kwargs)
        self.plan([UNMEASURED] * self._num_stages)

    def plan(self, seconds: Sequence[StageSeconds]) -> None:
        """Plan the order anew. All ranks of the pipeline call it, between steps.

        Args:
            seconds: What one micro-batch takes in each stage of the pipeline.
        """
        orders = best_order(seconds, self.pp_group_size, self._n_microbatches)
        self.pipeline_order = {
            rank: [schedules._Action(action.stage, _ACTIONS[action.kind], action.microbatch) for action in actions]
            for rank, actions in orders.items()
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
