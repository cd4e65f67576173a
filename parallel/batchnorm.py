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
import torch.nn.functional as F
from torch import Tensor

from models.batchnorm import StepBatchNorm


class RunningStatistics:
    """The running statistics of this rank's BatchNorm layers, updated from all micro-batches of all replicas."""

    def __init__(
        self,
        norms: Sequence[StepBatchNorm],
        microbatches: int,
        replicas: dist.ProcessGroup | None,
        synchronise: bool = False,
    ) -> None:
        """Refer to the layers.

        ``microbatches`` is how many each replica computes in a step, ``replicas`` the ranks that hold the same stages
        (None where there is one), and ``synchronise`` whether to normalise over the replicas' micro-batches together.
        """
        self._norms, self._microbatches, self._replicas = norms, microbatches, replicas
        if synchronise and replicas is not None:
            for norm in norms:
                norm.normalise = partial(normalise_over_replicas, group=replicas)

    def update(self, usable: bool) -> None:
        """Update the running statistics at the end of a step; nothing changes where it does not update the weights.

        All layers together: a GPU waits for this, and one by one the launches of their kernels take milliseconds.
        """
        seen = [norm.seen for norm in self._norms]
        means = torch._foreach_div(seen, self._microbatches)
        torch._foreach_zero_([*seen, *(norm.moments for norm in self._norms)])  # what is not finite is gone with them
        if not usable:
            return
        if self._replicas is not None:
            flat = torch.cat([mean.flatten() for mean in means]) / dist.get_world_size(self._replicas)
            dist.all_reduce(flat, group=self._replicas)
            means = [part.view(2, -1) for part in flat.split([mean.numel() for mean in means])]
        running = [tensor for norm in self._norms for tensor in (norm.running_mean, norm.running_var)]
        weights = [norm.momentum for norm in self._norms for _ in range(2)]
        torch._foreach_lerp_(running, [part for mean in means for part in mean.unbind()], weights)
        torch._foreach_add_([norm.num_batches_tracked for norm in self._norms], 1)


def normalise_over_replicas(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, moments: Tensor, *, group: dist.ProcessGroup
) -> Tensor:
    """Normalise over the equally large micro-batches of all ranks of ``group``, who call this together.

    Statistics are computed in float32 at least. The backward communicates too.

    Args:
        x: [b, c, ...], this rank's micro-batch.
        weight: [c].
        bias: [c].
        eps: Added to the variance.
        moments: [2, c]; gets the mean and the unbiased variance of all ranks' micro-batches.
        group: The replicas.
    """
    mean, variance = _moments(x.detach(), group)
    terms = x.numel() // x.shape[1] * dist.get_world_size(group)
    moments.copy_(torch.stack((mean, variance * (terms / (terms - 1)))))
    return _Normalise.apply(x, weight, bias, mean, variance, eps, group)


def _moments(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return mean [c] and biased variance [c] of all ranks' ``x`` from the ranks' own: sums of squares would cancel."""
    wide, dims = x.to(torch.promote_types(x.dtype, torch.float32)), [d for d in range(x.dim()) if d != 1]
    variance, mean = torch.var_mean(wide, dim=dims, correction=0)
    own = torch.stack((mean, variance))
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    means, variances = torch.stack(parts).unbind(1)
    mean = means.mean(0)
    return mean, (variances + (means - mean).square()).mean(0)


class _Normalise(torch.autograd.Function):
    """torch's kernels for statistics that are given, and what moving them with x adds to the gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, variance, eps, group):
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.group = eps, group
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, variance = ctx.saved_tensors
        # These count this rank's x only. DDP averages the parameters'; x also moved the mean and variance of all ranks.
        dx, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        shared = torch.stack((grad_bias, grad_weight))
        shared /= x.numel() // x.shape[1] * dist.get_world_size(ctx.group)
        dist.all_reduce(shared, group=ctx.group)
        shape, scale = [1, -1] + [1] * (x.dim() - 2), (variance + ctx.eps).rsqrt()
        slope, offset = (shared[1] * weight * scale.square()).view(shape), (shared[0] * weight * scale).view(shape)
        dx -= (x - mean.view(shape)) * slope + offset
        return dx, grad_weight, grad_bias, None, None, None, None
