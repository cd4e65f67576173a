"""BatchNorm across micro-batches and replicas.

Running statistics get one update per step. On request, the micro-batches that the replicas compute at the same time are
normalised by one mean and variance: ``nn.SyncBatchNorm`` refuses CPU tensors, and its running statistics depend on the
layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.batchnorm import StepBatchNorm


class RunningStatistics:
    """The running statistics of this rank's BatchNorm layers, updated from all micro-batches of all replicas."""

    def __init__(self, stages: Sequence[nn.Module], microbatches: int, replicas: dist.ProcessGroup | None) -> None:
        """Collect the layers.

        Args:
            stages: Of this rank.
            microbatches: How many each replica computes in a step.
            replicas: The ranks that hold the same stages, or None where there is one replica.
        """
        self._norms = [m for stage in stages for m in stage.modules() if isinstance(m, StepBatchNorm)]
        self._microbatches, self._replicas = microbatches, replicas

    def synchronise(self) -> None:
        """Normalise over the replicas' micro-batches together from now on."""
        if self._replicas is not None:
            for norm in self._norms:
                norm.normalise = partial(normalise_over_replicas, group=self._replicas)

    def update(self, usable: bool) -> None:
        """Update the running statistics at the end of a step.

        Args:
            usable: Whether the step updates the weights, the same on every rank. Otherwise nothing is changed.
        """
        if not self._norms:
            return
        seen = [norm.seen for norm in self._norms]
        means = torch._foreach_div(seen, self._microbatches)
        torch._foreach_zero_([*seen, *(norm.moments for norm in self._norms)])  # what is not finite is gone with them
        if not usable:
            return
        if self._replicas is not None:
            flat = torch.cat([mean.flatten() for mean in means]) / dist.get_world_size(self._replicas)
            dist.all_reduce(flat, group=self._replicas)
            means = [part.view(2, -1) for part in flat.split([mean.numel() for mean in means])]
        for norm, (mean, variance) in zip(self._norms, means, strict=True):
            norm.update(mean, variance)


def normalise_over_replicas(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, moments: Tensor, *, group: dist.ProcessGroup
) -> Tensor:
    """Normalise over the equally large micro-batches of all ranks of a group, who call this together.

    It is computed in float32 at least, and its backward communicates too.

    Args:
        x: [b, c, ...], this rank's micro-batch.
        weight: [c].
        bias: [c].
        eps: Added to the variance.
        moments: [2, c], finite; gets the mean and the unbiased variance of all ranks' micro-batches.
        group: The replicas.

    Returns:
        The normalised x.
    """
    if x.device.type == "cuda":
        return _OnCuda.apply(x, weight, bias, eps, moments, group)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean, variance = _moments(wide.detach(), group)
    terms = x.numel() // x.shape[1] * dist.get_world_size(group)
    moments.copy_(torch.stack((mean, variance * (terms / (terms - 1)))))
    return _NormaliseOverReplicas.apply(wide, weight, bias, mean, (variance + eps).rsqrt(), group).to(x.dtype)


class _OnCuda(torch.autograd.Function):
    """The calls of ``nn.SyncBatchNorm``, whose kernels are for CUDA alone.

    It would also wait for the device in every forward, to leave out ranks without samples. Here all have equally many.
    Source: torch/nn/modules/_functions.py of torch 2.13; the five functions are those of 2.11 and 2.15 as well.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, eps, moments, group):
        x = _dense(x)
        own = torch.stack(torch.batch_norm_stats(x, eps))  # mean and 1 / standard deviation
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        means, scales = torch.stack(parts, dim=1).unbind()
        counts = own.new_full((len(parts),), x.numel() // x.shape[1])
        mean, scale = torch.batch_norm_gather_stats_with_counts(
            x, means, scales, moments[0], moments[1], 1.0, eps, counts
        )
        ctx.save_for_backward(x, weight, mean, scale, counts.to(torch.int32))
        ctx.group = group
        return torch.batch_norm_elemt(x, weight, bias, mean, scale, eps)

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, scale, counts = ctx.saved_tensors
        dy = _dense(dy)
        sum_dy, sum_dy_centred, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            dy, x, mean, scale, weight, True, True, True
        )
        sums = torch.stack((sum_dy, sum_dy_centred))
        dist.all_reduce(sums, group=ctx.group)
        dx = torch.batch_norm_backward_elemt(dy, x, mean, scale, weight, sums[0], sums[1], counts)
        return dx, grad_weight, grad_bias, None, None, None


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


def _moments(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """[c] mean and [c] biased variance of all ranks' ``x``, from the ranks' own: sums of squares would cancel."""
    variance, mean = torch.var_mean(x, dim=_all_but_channels(x), correction=0)
    own = torch.stack((mean, variance))
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    means, variances = torch.stack(parts).unbind(1)
    mean = means.mean(0)
    return mean, (variances + (means - mean).square()).mean(0)


class _NormaliseOverReplicas(torch.autograd.Function):
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
        own = torch.stack((dy.sum(dims), (dy * centred).sum(dims)))
        terms = dy.numel() // dy.shape[1] * dist.get_world_size(ctx.group)
        mean = own / terms
        dist.all_reduce(mean, group=ctx.group)
        mean_dy, mean_dy_centred = (part.view(shape) for part in mean)
        dx = (dy - mean_dy - centred * mean_dy_centred) * (scale * weight).view(shape)
        return dx, own[1], own[0], None, None, None


def _spread(x: Tensor) -> list[int]:
    return [1, -1] + [1] * (x.dim() - 2)


def _all_but_channels(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]
