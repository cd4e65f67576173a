"""BatchNorm whose running statistics take one update per optimizer step, however the batch was cut.

torch's layer updates them at every forward: four micro-batches move them four times, two replicas hold two versions,
and a recomputed forward counts twice. Here a forward only adds up what it saw, and the strategy, who knows all
micro-batches and replicas, makes the one update at the end of the step: evaluation does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (x [b, c, ...], weight [c], bias [c], eps) -> (normalised x, mean [c], unbiased variance [c])
Normalise = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


def normalise(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise ``x`` [b, c, ...] by its own mean and variance over all but the channels."""
    # With momentum 1 torch leaves the micro-batch's own statistics in what it takes for the running ones.
    mean, variance = (torch.zeros_like(bias, requires_grad=False) for _ in range(2))
    y = F.batch_norm(x, mean, variance, weight, bias, training=True, momentum=1.0, eps=eps)
    return y, mean, variance


class BatchNorm2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` (same keys, same numbers) for a step of several micro-batches.

    Attributes:
        normalise: How a micro-batch is normalised in training; a strategy may set one that works across replicas.
        recomputing: True while a forward runs a second time for its backward: it is not counted again.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps, momentum)
        # Sums of means and of unbiased variances over the step's micro-batches; of no interest to a checkpoint.
        self.register_buffer("seen", torch.zeros(2, num_features), persistent=False)
        self.normalise: Normalise = normalise
        self.recomputing = False

    def reset_running_stats(self) -> None:
        """Forget all statistics, those of the step so far included."""
        super().reset_running_stats()
        if "seen" in self._buffers:
            self.seen.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[b, c, h, w] -> same."""
        if not self.training:
            return super().forward(x)
        y, mean, variance = self.normalise(x, self.weight, self.bias, self.eps)
        if not self.recomputing:
            with torch.no_grad():
                self.seen += torch.stack((mean, variance))
        return y

    @torch.no_grad()
    def update(self, mean: Tensor, variance: Tensor) -> None:
        """The step's one update: ``mean`` [c] and ``variance`` [c] are means over its micro-batches."""
        self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
        self.running_var.lerp_(variance.to(self.running_var), self.momentum)
        self.num_batches_tracked += 1
