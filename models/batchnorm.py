"""BatchNorm that updates its running statistics once per optimizer step, however the batch is cut.

torch's layer updates them at every forward: four micro-batches update them four times, two replicas hold two versions,
and a recomputed forward counts twice. Here a forward only writes its statistics into a buffer. The strategy adds up the
statistics of all micro-batches and replicas and makes one update at the end of the step, so evaluation does not depend
on the layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A function (x [b, c, ...], weight [c], bias [c], eps, moments [2, c]) -> normalized x. It writes the mean and the
# unbiased variance of x into ``moments``, which must hold finite numbers.
Normalise = Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]


def normalise(x: Tensor, weight: Tensor, bias: Tensor, eps: float, moments: Tensor) -> Tensor:
    """Normalize x [b, c, ...] by its own statistics over all dimensions except the channels. See ``Normalise``."""
    # With momentum 1, torch writes the micro-batch's statistics into the buffers of the running statistics, without a
    # further kernel. torch adds 0 times the old values, so the old values must be finite.
    mean, variance = moments.unbind()
    return F.batch_norm(x, mean, variance, weight, bias, training=True, momentum=1.0, eps=eps)


class StepBatchNorm(nn.modules.batchnorm._BatchNorm):
    """The base class of the layers below: torch's layers (same keys and numbers) for steps of several micro-batches.

    Attributes:
        normalise: The function that normalizes a micro-batch in training. A strategy may set a function for all
            replicas.
        moments: [2, c] mean and unbiased variance of the newest micro-batch.
    """

    moments: Tensor
    # Attributes of torch's layer. They may be None there.
    momentum: float
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        """See torch's layer of the same name."""
        super().__init__(num_features, eps, momentum)
        self.normalise: Normalise
        become(self, type(self))

    def reset_running_stats(self) -> None:
        """Set the running statistics to their initial values."""
        super().reset_running_stats()
        if "moments" in self._buffers:
            self.moments.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [b, c, ...]."""
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        return self.normalise(x, self.weight, self.bias, self.eps, self.moments)


def become(norm: nn.Module, kind: type[StepBatchNorm]) -> None:
    """Turn a BatchNorm of torch into a layer of this ``kind``, in place."""
    norm.__class__, norm.normalise = kind, normalise  # pyright: ignore  # torch's stub knows tensors and modules only
    # Not saved in checkpoints, because every step sets it.
    moments = torch.stack((norm.running_mean, norm.running_var)).zero_()  # pyright: ignore[reportArgumentType]
    norm.register_buffer("moments", moments, persistent=False)


class BatchNorm1d(StepBatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d``: [b, c] or [b, c, t] -> same."""


class BatchNorm2d(StepBatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d``: [b, c, h, w] -> same."""


class BatchNorm3d(StepBatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d``: [b, c, d, h, w] -> same."""
