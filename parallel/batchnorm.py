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
from torch import Tensor, nn

from models.batchnorm import StepBatchNorm

# reportPrivateImportUsage: torch's stubs do not export its functions of several tensors (_foreach_), which it has.


class RunningStatistics:
    """The running statistics of this rank's BatchNorm layers, updated from all micro-batches of all replicas."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        microbatches: int,
        replicas: dist.ProcessGroup | None,
        synchronise: bool = False,
    ) -> None:
        """Refer to the layers of some stages, of which there is one at least.

        ``microbatches`` is how many each replica computes in a step, ``replicas`` the ranks that hold the same stages
        (None where there is one), and ``synchronise`` whether to normalise over the replicas' micro-batches together.
        """
        self._microbatches, self._replicas = microbatches, replicas
        of_stage = {stage: [m for m in stage.modules() if isinstance(m, StepBatchNorm)] for stage in stages}
        norms = [norm for some in of_stage.values() for norm in some]
        # Tensors are listed once: a GPU waits for what the host does at the end of a step.
        self._moments = {stage: [norm.moments for norm in some] for stage, some in of_stage.items()}
        self._sums = {stage: [torch.zeros_like(one) for one in moments] for stage, moments in self._moments.items()}
        self._all_sums = [tensor for some in self._sums.values() for tensor in some]
        self._to_clear = [*self._all_sums, *(norm.moments for norm in norms)]
        self._running = [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var)]
        self._weights = [norm.momentum for norm in norms for _ in range(2)]
        self._counts = [norm.num_batches_tracked for norm in norms]
        self._means: Sequence[Tensor] = ()
        if synchronise and replicas is not None:
            for norm in norms:
                norm.normalise = partial(normalise_over_replicas, group=replicas)

    def add(self, stage: nn.Module) -> None:
        """Add up what a stage's layers saw in the newest micro-batch, after its forward."""
        if self._sums[stage]:
            torch._foreach_add_(self._sums[stage], self._moments[stage])  # pyright: ignore[reportPrivateImportUsage]

    def take(self) -> None:
        """Take the means over the step's micro-batches, before the host waits for the step's numbers.

        All layers together: one by one, the launches of their kernels take milliseconds.
        """
        means = torch._foreach_div(self._all_sums, self._microbatches)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_zero_(self._to_clear)  # pyright: ignore[reportPrivateImportUsage]
        self._means = means  # what is not finite is gone from the sums

    def update(self) -> None:
        """Update the running statistics with what was taken, where the step updates the weights."""
        means = self._means
        if self._replicas is not None:
            flat = torch.cat([mean.flatten() for mean in means]) / dist.get_world_size(self._replicas)
            dist.all_reduce(flat, group=self._replicas)
            means = [part.view(2, -1) for part in flat.split([mean.numel() for mean in means])]
        parts = [part for mean in means for part in mean.unbind()]
        torch._foreach_lerp_(self._running, parts, self._weights)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(self._counts, 1)  # pyright: ignore[reportPrivateImportUsage]


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
