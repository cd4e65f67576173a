"""How a strategy's steps are run, and the numbers that come of one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Options:
    """How stages are run, whatever the layout.

    Attributes:
        seed: The run's seed, for weights and dropout.
        timeout_s: The longest that a rank waits for another.
        bucket_mb: The size of DDP's buckets in MiB.
        comm_hook: How gradients are sent: none, bf16, fp16, hierarchical or hierarchical_bf16 (see parallel.averaging).
        sync_batchnorm: Whether BatchNorm normalises over the micro-batches of all replicas together.
        recompute: Whether activations are recomputed in the backward.
        compile: Whether layers are compiled.
    """

    seed: int
    timeout_s: float = 300.0
    bucket_mb: float = 25.0
    comm_hook: str = "none"
    sync_batchnorm: bool = False
    recompute: bool = False
    compile: bool = False


@dataclass(frozen=True)
class StepResult:
    """The numbers of a training step, the same on every rank.

    Attributes:
        loss: The mean over the ``terms`` of the global batch.
        grad_norm: Of the whole model before clipping, tied parameters counted once.
        stop: Whether some rank asked to stop.
        terms: How many terms the loss has: tokens that are no padding, for a language model.
        spike: Whether the loss is above the limit that was given.
        metrics: The mean of each of the loss's metrics over the same terms, by name.
    """

    loss: float
    grad_norm: float
    stop: bool
    terms: float
    spike: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def usable(self) -> bool:
        """Whether the weights may be updated."""
        return self.finite and not self.spike
