"""torch's pipeline stage, which here notes when it works, and hands tensors over by shared memory where it can."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input

from parallel.boxes import Boxes
from parallel.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    Timeline,
    now,
)


class PipeStage(PipelineStage):
    """Notes when its forwards, backwards and receives ran (waiting for neighbours is in the last only).

    boxes  what passes through them in training steps; the rest goes through torch. A step ends with an all-reduce, so
           that nobody puts the next one's tensors in place of some that are still in use. In evaluation, where stages
           run ahead of each other, nothing says when they are not: it goes through torch, whose sends wait
    """

    def __init__(self, timeline: Timeline, boxes: Boxes, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._timeline, self._boxes = timeline, boxes

    # -- receiving -------------------------------------------------------------------------------------------------

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        if has_backward:
            self._receive_into_box(RECEIVE_ACTIVATION, self.args_recv_info)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        self._receive_into_box(RECEIVE_GRADIENT, self.grad_recv_info)

    def _receive_into_box(self, kind: str, infos: Mapping[int, tuple]) -> None:
        if kind in self._boxes.inboxes:
            for chunk, (info,) in infos.items():
                info.buffer = self._boxes.inboxes[kind].slot(chunk, info.buffer)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._post(RECEIVE_ACTIVATION, fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._post(RECEIVE_GRADIENT, bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def _post(self, kind: str, chunk: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        if operations:
            self._timeline.post(kind, self.stage_index, chunk)
        return [] if self.has_backward and kind in self._boxes.inboxes else operations

    def _begin(self, kind: str, chunk: int) -> float:
        """When work on what was received starts, which may be now."""
        if self.has_backward and kind in self._boxes.inboxes:
            what = f"{_NAMES[kind]} of micro-batch {chunk} for stage {self.stage_index}"
            self._boxes.inboxes[kind].wait(chunk, what, self._boxes.timeout_s)
        return self._timeline.begin(kind, self.stage_index, chunk)

    # -- work ------------------------------------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        start = self._begin(RECEIVE_ACTIVATION, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._timeline.note(FORWARD, self.stage_index, fwd_chunk_id, start)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, loss=None, full_backward: bool = True, last_backward: bool = False):
        start = self._begin(RECEIVE_GRADIENT, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._timeline.note(BACKWARD if full_backward else BACKWARD_INPUT, self.stage_index, bwd_chunk_id, start)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False):
        """Where inputs' gradients are taken apart from the weights', those of vectors go with the former: a norm and a
        bias have them at hand when they have their input's. torch puts them off, and does each norm's backward twice:
        ResNet-50's backward took 8 % longer than in one piece, this way 2."""
        if backward_type != "input":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        inputs = bwd_kwargs["input_values"]
        vectors = [p for p in self.submod.parameters() if p.dim() < 2]
        matrices = (p for p in self.submod.parameters() if p.dim() >= 2)
        gradients, put_off = stage_backward_input(
            bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], [*inputs, *vectors], matrices
        )
        return gradients[: len(inputs)], put_off

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False):
        start = now()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._timeline.note(BACKWARD_WEIGHT, self.stage_index, bwd_chunk_id, start)

    # -- sending ---------------------------------------------------------------------------------------------------

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(RECEIVE_ACTIVATION, fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(RECEIVE_GRADIENT, bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, kind: str, chunk: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        if not self.has_backward or kind not in self._boxes.outboxes:
            return operations
        for operation in operations:
            self._boxes.outboxes[kind].put(chunk, operation.tensor)
        return []


_NAMES = {RECEIVE_ACTIVATION: "input", RECEIVE_GRADIENT: "gradient"}
