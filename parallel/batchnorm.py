"""BatchNorm across micro-batches and replicas: one update of the running statistics a step; on request, one mean and
variance for the micro-batches that the replicas work on at the same time.

``nn.SyncBatchNorm`` refuses CPU tensors, and its running statistics depend on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.batchnorm import BatchNorm2d


class RunningStatistics:
    """The BatchNorm layers of this rank's stages, updated once a step from what all micro-batches of all replicas
    saw. ``replicas`` is the group of ranks that hold the same stages, None where there is one."""

    def __init__(self, stages: Sequence[nn.Module], microbatches: int, replicas: dist.ProcessGroup | None) -> None:
        self._norms = [m for stage in stages for m in stage.modules() if isinstance(m, BatchNorm2d)]
        self._microbatches, self._replicas = microbatches, replicas

    def synchronise(self) -> None:
        """From now on, normalise over the replicas' micro-batches together."""
        if self._replicas is not None:
            for norm in self._norms:
                norm.normalise = partial(normalise_together, group=self._replicas)

    def update(self, finite: bool) -> None:
        """End of a step. One that is skipped (not ``finite``, the same on every rank) leaves no trace here either."""
        if not self._norms:
            return
        means = [norm.seen / self._microbatches for norm in self._norms]
        for norm in self._norms:
            norm.seen.zero_()
        if not finite:
            return
        if self._replicas is not None:
            flat = torch.cat([mean.flatten() for mean in means]) / dist.get_world_size(self._replicas)
            dist.all_reduce(flat, group=self._replicas)
            means = [part.view(2, -1) for part in flat.split([mean.numel() for mean in means])]
        for norm, (mean, variance) in zip(self._norms, means, strict=True):
            norm.update(mean, variance)


def normalise_together(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """``models.batchnorm.normalise`` over the equally large ``x`` of all ranks of ``group``, who call it together.

    In float32 at least, whatever the type of ``x``; its gradient takes part in the exchange.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean, variance = _moments(wide.detach(), group)
    y = _NormaliseTogether.apply(wide, weight, bias, mean, (variance + eps).rsqrt(), group)
    terms = x.numel() // x.shape[1] * dist.get_world_size(group)
    return y.to(x.dtype), mean, variance * (terms / (terms - 1))


def _moments(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """[c] mean and [c] biased variance of all ranks' ``x``: theirs are gathered, since summing squares would cancel."""
    variance, mean = torch.var_mean(x, dim=_all_but_channels(x), correction=0)
    mine = torch.stack((mean, variance))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    means, variances = torch.stack(parts).unbind(1)
    mean = means.mean(0)
    return mean, (variances + (means - mean).square()).mean(0)


class _NormaliseTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, mean, scale, group):
        shape = _spread(x)
        centred = (x - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(centred, weight, scale)
        ctx.group = group
        return centred * weight.view(shape) + bias.view(shape)

    @staticmethod
    def backward(ctx, dy):
        centred, weight, scale = ctx.saved_tensors
        shape, dims = _spread(dy), _all_but_channels(dy)
        # Of this rank's x for the parameters, which DDP averages; of all ranks' for x, which moved their mean too.
        mine = torch.stack((dy.sum(dims), (dy * centred).sum(dims)))
        terms = dy.numel() // dy.shape[1] * dist.get_world_size(ctx.group)
        together = mine / terms
        dist.all_reduce(together, group=ctx.group)
        mean_dy, mean_dy_centred = (part.view(shape) for part in together)
        dx = (dy - mean_dy - centred * mean_dy_centred) * (scale * weight).view(shape)
        return dx, mine[1], mine[0], None, None, None


def _spread(x: Tensor) -> list[int]:
    return [1, -1] + [1] * (x.dim() - 2)


def _all_but_channels(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]
