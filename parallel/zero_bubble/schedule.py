"""torch's stage and schedule, with backwards in two parts and a planned order."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

from parallel.actions import UNMEASURED, StageSeconds, stage_seconds
from parallel.pipe_stage import PipeStage
from parallel.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from parallel.zero_bubble.order import best_order
from parallel.zero_bubble.split_backward import backward_inputs, backward_weights

# The number of steps, including the warm-up, after which the order is planned again for the measured times.
MEASURED_STEPS = 4

ACTIONS = {
    FORWARD: schedules.FORWARD,
    BACKWARD: schedules.FULL_BACKWARD,
    BACKWARD_INPUT: schedules.BACKWARD_INPUT,
    BACKWARD_WEIGHT: schedules.BACKWARD_WEIGHT,
}


class SplitStage(PipeStage):
    """A stage that splits its backward.

    Autograd does not accumulate the gradients of a split backward, so DistributedDataParallel never sees them (pytorch
    issue 144530). The axes start to reduce these gradients here, while other stages compute.
    """

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce gradients over replicas. Called once per step or evaluation, after the last backward."""
        super().perform_reduce_grad(grad_scale_factor)
        for axis in self.strategy.axes if self.has_backward else ():
            axis.start_reducing(self.submod)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False):
        """Compute the second part of a split backward, and record when it ran."""
        with self._recorded(BACKWARD_WEIGHT, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward(self, backward_type: str, bwd_kwargs: dict, last_backward: bool):
        """See ``PipeStage.backward``.

        A split backward computes the gradients of vectors together with the gradients of inputs, since norms and biases
        compute both together. ResNet-50's split backward then takes 2 % longer than a whole backward, instead of 8 %.
        """
        if backward_type == "weight":
            backward_weights(bwd_kwargs["param_groups"])
            return (), None
        if backward_type == "full":
            return super().backward(backward_type, bwd_kwargs, last_backward)
        if isinstance(self.submod, FSDPModule):  # torch's stage does the same in the backwards that it runs itself
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        inputs = bwd_kwargs["input_values"]
        vectors = [p for p in self.submod.parameters() if p.dim() < 2]
        matrices = [p for p in self.submod.parameters() if p.dim() >= 2]
        outputs, output_grads = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        gradients, deferred = backward_inputs(outputs, output_grads, [*inputs, *vectors], matrices)
        for vector, gradient in zip(vectors, gradients[len(inputs) :], strict=True):
            if gradient is not None:
                # A copy, because the gradient of a sum is the same tensor for all summands.
                vector.grad = gradient.clone() if vector.grad is None else vector.grad.add_(gradient)
        return gradients, deferred


class PlannedSchedule(schedules._PipelineScheduleRuntime):
    """A looped schedule with the shortest simulated makespan, planned first for textbook times, then for measured ones.

    torch adds sends and receives to the order, and runs it.
    """

    def __init__(self, stages: list[PipeStage], n_microbatches: int, **kwargs) -> None:
        """Plan for textbook times. The arguments are those of torch's schedules."""
        super().__init__(stages, n_microbatches, **kwargs)
        self._strategy, self._timeline = stages[0].strategy, stages[0].timeline
        self._measured = False
        self.plan([UNMEASURED] * self._num_stages)

    def step(self, *args, **kwargs):
        """Run a step. The arguments are those of torch's schedules."""
        timeline = self._timeline  # shared by the schedules of all shapes
        if timeline.measured is None and len(timeline.steps) == MEASURED_STEPS:
            recorded = stage_seconds(list(timeline.steps))
            gathered = self._strategy.mesh.gather(list(recorded.items()))
            timeline.measured = {stage: StageSeconds(*times) for of_rank in gathered for stage, times in of_rank}
        if not self._measured and timeline.measured is not None:
            self._measured = True
            self.plan([timeline.measured[stage] for stage in range(self._num_stages)])
        return super().step(*args, **kwargs)

    def plan(self, seconds: Sequence[StageSeconds]) -> None:
        """Plan the order again. All ranks of the pipeline call this, between steps."""
        orders = best_order(seconds, self.pp_group_size, self._n_microbatches)
        self.pipeline_order = {
            rank: [schedules._Action(action.stage, ACTIONS[action.kind], action.microbatch) for action in actions]
            for rank, actions in orders.items()
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
