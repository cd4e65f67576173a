"""A pipeline stage of torch that also sends tensors without gradients and records a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from models.chain import as_tuple
from parallel.devices import outside_autocast
from parallel.mesh import PIPELINE
from parallel.stage import Stage
from parallel.strategy import Strategy
from parallel.timeline import BACKWARD, BACKWARD_INPUT, FORWARD, RECEIVE_ACTIVATION, RECEIVE_GRADIENT

Border = Sequence[Tensor]  # tensors without memory


class PipeStage(PipelineStage):
    """A pipeline stage that also passes on tensors without gradients, and records when it works.

    torch's stage gets only the border tensors that have a gradient, because before torch 2.13 it expects a gradient for
    every tensor that it sends. This class sends the tensors without a gradient (token numbers, masks) after them.
    """

    def __init__(
        self, strategy: Strategy, stage: Stage, module: nn.Module, index: int, received: Border, sent: Border
    ) -> None:
        plan, pipeline = strategy.plan, strategy.mesh.axis(PIPELINE)
        assert strategy.timeline is not None  # a pipeline has one
        stages, ranks = len(plan.stages), pipeline.ranks
        # The positions of the tensors that need no gradient, among the received tensors and among the sent tensors.
        self._constants_in = [i for i, x in enumerate(received) if index > 0 and not x.requires_grad]
        self._constants_out = [i for i, x in enumerate(sent) if index < stages - 1 and not x.requires_grad]
        incoming = [_border(stage, x) if index > 0 else x for x in received]
        super().__init__(
            module,
            index,
            stages,
            strategy.device,
            input_args=_without(incoming, self._constants_in),
            output_args=_without([_border(stage, x) for x in sent], self._constants_out),
            group=pipeline.group,
        )
        self.strategy = strategy
        self._stage, self._statistics, self.timeline = stage, strategy.statistics, strategy.timeline
        self._neighbours = ranks[(index - 1) % len(ranks)], ranks[(index + 1) % len(ranks)]  # before and after
        self._examples = [incoming[i] for i in self._constants_in]
        self._dtypes_out = [x.dtype for x in sent] if index < stages - 1 else []
        # Tensors without gradients, by micro-batch: the received tensors, and the tensors to send.
        self._arriving: dict[int, list[Tensor]] = {}
        self._leaving: dict[int, list[Tensor]] = {}
        self._microbatch = 0

    # -- sends and receives ----------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's activations."""
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        if self._examples:
            tensors = [torch.empty_like(example, device=self.device) for example in self._examples]
            self._arriving[fwd_chunk_id] = tensors
            operations += [dist.P2POp(dist.irecv, tensor, self._neighbours[0], self.group) for tensor in tensors]
        return self._posted(RECEIVE_ACTIVATION, fwd_chunk_id, operations)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a micro-batch's activations."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        tensors = self._leaving.pop(fwd_chunk_id) if self._constants_out else ()
        return operations + [dist.P2POp(dist.isend, tensor, self._neighbours[1], self.group) for tensor in tensors]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of the gradients of the tensors that this stage has sent."""
        return self._posted(RECEIVE_GRADIENT, bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def _posted(self, kind: str, microbatch: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        if operations:
            self.timeline.post(kind, self.stage_index, microbatch)
        return operations

    # -- computation -----------------------------------------------------------------------------------------------

    @contextmanager
    def _recorded(self, kind: str, microbatch: int, receive: str = "") -> Iterator[None]:
        """Record when the block ran, and that the tensor it needs, if any, has been received."""
        self.strategy.computing = FORWARD if kind == FORWARD else BACKWARD, microbatch
        start = self.timeline.begin(receive, self.stage_index, microbatch)
        yield
        self.timeline.note(kind, self.stage_index, microbatch, start)
        self.strategy.computing = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        """Compute a micro-batch's forward, and record when it ran."""
        self._microbatch = fwd_chunk_id
        with self._recorded(FORWARD, fwd_chunk_id, RECEIVE_ACTIVATION):
            output = _unwrapped(super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)
            if self._stage.training and torch.is_grad_enabled():
                self._statistics.add(self._stage)
        return output

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs):
        """Call the module with all received tensors, and return to torch the outputs that have gradients."""
        if self._constants_in:
            tensors = list(args)
            for position, tensor in zip(self._constants_in, self._arriving.pop(self._microbatch), strict=True):
                tensors.insert(position, tensor)
            args = tuple(tensors)
        output = super().forward_maybe_with_nosync(*args, **kwargs)
        if not self._dtypes_out:
            return output
        # The next stage expects the dtypes of training. In an evaluation a layer may return another dtype, as torch's
        # nn.TransformerEncoderLayer does under autocast.
        outputs = tuple(tensor.to(dtype) for tensor, dtype in zip(as_tuple(output), self._dtypes_out, strict=True))
        if not self._constants_out:
            return outputs if isinstance(output, tuple) else outputs[0]
        self._leaving[self._microbatch] = [outputs[i] for i in self._constants_out]
        return _without(outputs, self._constants_out)

    def backward_one_chunk(self, bwd_chunk_id: int, loss=None, full_backward: bool = True, last_backward: bool = False):
        """Compute a micro-batch's backward, or its first part, and record when the backward ran."""
        with self._recorded(BACKWARD if full_backward else BACKWARD_INPUT, bwd_chunk_id, RECEIVE_GRADIENT):
            _unwrapped(super().backward_one_chunk, bwd_chunk_id, loss, full_backward, last_backward)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False):
        """Compute gradients: "full" for all; "input" and later "weight" for those of inputs and of weights."""
        with outside_autocast(self.device.type):
            gradients, deferred = self.backward(backward_type, bwd_kwargs, last_backward)
        inputs = bwd_kwargs.get("input_values", ())
        return tuple(_as_sent(*pair) for pair in zip(inputs, gradients, strict=False)), deferred

    def backward(self, backward_type: str, bwd_kwargs: dict, last_backward: bool):
        """Return the gradients of the inputs, and the ``param_groups`` for a later call of type "weight"."""
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


def _unwrapped(method: Callable, *args, **kwargs):
    """Call a method of torch's stage. If a layer fails, raise the layer's error, not the RuntimeError around it."""
    try:
        return method(*args, **kwargs)
    except RuntimeError as error:
        if error.__cause__ is None or "ailed to run" not in str(error):
            raise
        raised = error.__cause__
    raise raised


def _as_sent(x: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return the gradient of input ``x`` to send to the previous stage; zeros if the loss does not depend on ``x``."""
    if gradient is not None:
        return gradient.contiguous()
    return torch.zeros_like(x) if isinstance(x, Tensor) and x.requires_grad else None


def _without(tensors: Sequence[Tensor], positions: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(tensor for i, tensor in enumerate(tensors) if i not in positions)


def _border(stage: Stage, x: Tensor) -> Tensor:
    """Return a tensor without memory in the form in which it is sent between stages."""
    return stage.as_sent(x.detach()).requires_grad_(x.requires_grad)
