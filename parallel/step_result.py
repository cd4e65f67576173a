"""The numbers of a training step on which all ranks agree, and the scale of the loss that follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepResult:
    """The numbers of a training step, the same on every rank.

    ``loss`` and ``metrics`` are means over the ``terms`` of the global batch, and NaN if there are no terms. The terms
    of a language model are its tokens without padding. ``grad_norm`` is the norm of the whole model's gradients before
    clipping, with tied parameters counted once. ``stop`` is whether a rank asked to stop. ``spike`` is whether the loss
    is above the given limit.
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


@dataclass
class LossScale:
    """Loss scaling for float16. The scale is doubled after ``interval`` good steps and halved at a bad step.

    torch's GradScaler looks for infinities in one optimizer at a time. With stages on different ranks, all ranks must
    make the same decision, so it is based on the numbers on which the ranks have agreed. The constants are
    GradScaler's.
    """

    enabled: bool
    scale: float = 65536.0
    good_steps: int = 0
    interval: int = 2000

    def __post_init__(self) -> None:
        self._after_counted = self.scale, self.good_steps

    @property
    def factor(self) -> float:
        """The factor by which the loss is multiplied before the backward."""
        return self.scale if self.enabled else 1.0

    def update(self, result: StepResult) -> None:
        """Adapt the scale. Called once per step, with a result that is the same on every rank."""
        if not self.enabled or not result.terms:
            return
        self.good_steps = self.good_steps + 1 if result.finite else 0
        if not result.finite:
            self.scale /= 2
        elif self.good_steps == self.interval:
            self.scale, self.good_steps = self.scale * 2, 0
        if result.usable:
            self._after_counted = self.scale, self.good_steps

    def state_dict(self) -> dict[str, float]:
        """Return the scale after the last counted step. A resumed run repeats the steps that were skipped after it."""
        scale, good_steps = self._after_counted
        return {"scale": scale, "good_steps": good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a result of ``state_dict``."""
        self.scale, self.good_steps = self._after_counted = float(state["scale"]), int(state["good_steps"])
