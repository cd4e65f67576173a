"""An all-to-all whose gradients go back to the ranks that sent the tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Sizes = Sequence[int] | None  # the number of rows for each rank, or from each rank; None for equal numbers


class AllToAll(torch.autograd.Function):
    """Sends rows, in the order of the ranks, and returns those that arrive. The backward also reaches ``reached``."""

    @staticmethod
    def forward(  # noqa: D102
        ctx, rows: Tensor, group: dist.ProcessGroup | None, sent: Sizes = None, received: Sizes = None,
        reached: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        ctx.back = group, received, sent
        arrived = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad: Tensor):  # noqa: D102  # pyright: ignore[reportIncompatibleMethodOverride]
        return AllToAll.apply(grad, *ctx.back), None, None, None, None
