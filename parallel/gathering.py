"""Gathering of the rows of all replicas in ``models.losses.gather``, for losses and layers that compare samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from common.errors import PlanError
from models.losses import replicas
from parallel.layout import Layout
from parallel.mesh import Ranks
from parallel.plan import Plan


@contextmanager
def gathering(plan: Plan, axis: Ranks | None = None, compiled: bool = False) -> Iterator[None]:
    """Let ``gather`` return the rows of all replicas along ``axis`` in the block; without an axis, its argument.

    If the plan divides the samples of a replica, ``gather`` raises PlanError. ``compiled`` is whether layers or losses
    are compiled.
    """
    before, replicas.gather = replicas.gather, None
    if divides_samples(plan):
        replicas.gather = partial(refuse_to_gather, plan)
    elif axis is not None and axis.size > 1:
        all_rows = partial(_Gather.apply, axis)
        replicas.gather = torch.compiler.disable(all_rows) if compiled else all_rows  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        replicas.gather, replicas.filled = before, None


def divides_samples(layout: Layout) -> bool:
    """Return whether a layout divides the samples of a replica."""
    return layout.chunks > 1 or (layout.pp == 1 and len(layout.devices) > 1)


def refuse_to_gather(layout: Layout, rows: Tensor | None = None) -> NoReturn:
    """Raise the error for a layout that divides the samples of a replica."""
    raise PlanError(
        f"models.losses.gather() compares all samples of a step at once, and parallel={layout.strategy} "
        f"parallel.chunks={layout.chunks} divides those of a replica; set parallel.chunks=1, with more replicas "
        "(parallel=ddp, fsdp or hsdp) if the samples do not fit into memory"
    )


class _Gather(torch.autograd.Function):
    """All rows of the ranks along an axis. The gradient of a rank's rows is the sum over the ranks."""

    @staticmethod
    def forward(ctx, axis: Ranks, rows: Tensor) -> Tensor:
        counts = [int(n) for n in torch.cat(axis.all_gather(torch.tensor([len(rows)], device=rows.device)))]
        padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, max(counts) - len(rows)))
        ctx.axis, ctx.first, ctx.count = axis, sum(counts[: axis.index]), len(rows)
        return torch.cat([part[:n] for part, n in zip(axis.all_gather(padded), counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).clone()  # each replica adds its own
        dist.all_reduce(total, group=ctx.axis.group)
        return None, total.narrow(0, ctx.first, ctx.count).to(gradient.dtype)
