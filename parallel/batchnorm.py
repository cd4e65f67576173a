"""BatchNorm across micro-batches and replicas.

Running statistics get one update per step. Optionally, the micro-batches that the replicas compute at the same time are
normalized by one mean and variance. ``nn.SyncBatchNorm`` is not used because it refuses CPU tensors, and its running
statistics depend on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from models.batchnorm import StepBatchNorm

# reportPrivateImportUsage: torch's stubs do not export its _foreach_ functions.


class RunningStatistics:
    """The running statistics of this rank's BatchNorm layers, updated from all micro-batches of all replicas."""

    def __init__(
        self, stages: Sequence[nn.Module], microbatches: int, replicas: dist.ProcessGroup | None, sync: bool = False
    ) -> None:
        """Find the BatchNorm layers of the given stages, if there are any.

        ``microbatches`` is the number of micro-batches that each replica computes in a step. ``replicas`` is the group
        of the ranks that hold the same stages, None if there is one replica. ``sync`` is whether to normalize over the
        micro-batches of all replicas together.
        """
        self._microbatches, self._replicas = microbatches, replicas
        of_stage = {stage: [m for m in stage.modules() if isinstance(m, StepBatchNorm)] for stage in stages}
        norms = self._norms = [norm for some in of_stage.values() for norm in some]
        # Tensors are listed once, because a GPU waits for the host at the end of a step.
        self._moments = {stage: [norm.moments for norm in some] for stage, some in of_stage.items()}
        self._sums = {stage: [*map(torch.zeros_like, moments)] for stage, moments in self._moments.items()}
        self._all_sums = [tensor for some in self._sums.values() for tensor in some]
        self._parts = [part for norm in norms for part in norm.moments.unbind()]
        self._running = [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var)]
        self._weights = [norm.momentum for norm in norms for _ in range(2)]
        self._counts = [norm.num_batches_tracked for norm in norms]
        self._means: Sequence[Tensor] = ()
        if sync and replicas is not None:
            for norm in norms:
                norm.normalise = partial(normalise_over_replicas, group=replicas)

    def begin(self) -> None:
        """Begin a step. Moments start as running statistics, so an unused layer keeps its statistics."""
        if self._norms:
            torch._foreach_copy_(self._parts, self._running)  # pyright: ignore[reportPrivateImportUsage]

    def add(self, stage: nn.Module) -> None:
        """Add the moments that a stage's layers computed in the newest micro-batch. Call it after its forward."""
        if self._sums[stage]:
            torch._foreach_add_(self._sums[stage], self._moments[stage])  # pyright: ignore[reportPrivateImportUsage]

    def take(self) -> None:
        """Compute the means over the step's micro-batches, before the host waits for the step's numbers.

        All layers are computed together, because launching kernels for each of them takes milliseconds.
        """
        if self._norms:
            means = torch._foreach_div(self._all_sums, self._microbatches)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_zero_(self._all_sums)  # pyright: ignore[reportPrivateImportUsage]
            self._means = means  # the sums are zero again, so a number that is not finite does not stay in them

    def update(self) -> None:
        """Update the running statistics with the means from ``take``. Called if the step updates the weights."""
        if not (means := self._means):
            return
        if self._replicas is not None:
            flat = torch.cat([mean.flatten() for mean in means]) / dist.get_world_size(self._replicas)
            dist.all_reduce(flat, group=self._replicas)
            means = [part.view(2, -1) for part in flat.split([mean.numel() for mean in means])]
        parts = [part for mean in means for part in mean.unbind()]
        # A layer that a module's ``train`` keeps in evaluation mode has no moments. Its statistics do not change.
        updates = [int(norm.training) for norm in self._norms]
        weights = [weight * updates[i // 2] for i, weight in enumerate(self._weights)]
        torch._foreach_lerp_(self._running, parts, weights)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(self._counts, updates)  # pyright: ignore[reportPrivateImportUsage]


def normalise_over_replicas(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, moments: Tensor, *, group: dist.ProcessGroup
) -> Tensor:
    """Normalize over the equally large micro-batches of all ranks of ``group``. All ranks call this together.

    Statistics are computed in float32 or a wider dtype. The backward communicates too.

    Args:
        x: [b, c, ...], this rank's micro-batch.
        weight: [c].
        bias: [c].
        eps: Added to the variance.
        moments: [2, c], filled with the mean and the unbiased variance of all ranks' micro-batches.
        group: The replicas.
    """
    mean, variance = _moments(x.detach(), group)
    terms = x.numel() // x.shape[1] * dist.get_world_size(group)
    moments.copy_(torch.stack((mean, variance * (terms / (terms - 1)))))
    return _Normalize.apply(x, weight, bias, mean, variance, eps, group)


def _moments(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return mean [c] and biased variance [c] over all ranks, from each rank's: sums of squares would cancel."""
    wide, dims = x.to(torch.promote_types(x.dtype, torch.float32)), [d for d in range(x.dim()) if d != 1]
    variance, mean = torch.var_mean(wide, dim=dims, correction=0)
    local = torch.stack((mean, variance))
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    means, variances = torch.stack(parts).unbind(1)
    mean = means.mean(0)
    return mean, (variances + (means - mean).square()).mean(0)


class _Normalize(torch.autograd.Function):
    """Normalization by given statistics. Its gradient takes into account that the statistics depend on x."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, variance, eps, group):
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.group = eps, group
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, variance = ctx.saved_tensors
        # These gradients come from this rank's x only. DDP averages the gradients of the parameters; x also changes the
        # statistics on all ranks.
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
