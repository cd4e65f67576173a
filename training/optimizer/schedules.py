"""The learning-rate schedules.

A schedule is a class with a method ``factor(step, total, per_epoch)``, which returns the factor on ``optim.lr`` for a
step, counted from 1, of ``total`` steps with ``per_epoch`` steps per epoch. It is a pure function, so that a schedule
has no state to resume.
"""

from __future__ import annotations

import math
from typing import Literal

from common.errors import TrainingError


class Constant:
    """The same learning rate throughout."""

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """Return 1 for every step."""
        return 1.0


class Step:
    """Multiplies the learning rate by ``gamma`` after every ``every`` epochs or steps (torch's StepLR).

    Args:
        every: Length of a period, in units of ``unit``.
        unit: "step" or "epoch".
        gamma: Factor from one period to the next.

    Raises:
        TrainingError: The period is below 1.
    """

    def __init__(self, every: int = 1, unit: Literal["step", "epoch"] = "epoch", gamma: float = 0.95) -> None:
        if every < 1:
            raise TrainingError(f"scheduler.every={every} must be at least 1")
        self.every, self.unit, self.gamma = every, unit, gamma

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """Return ``gamma`` to the power of the number of completed periods."""
        period = self.every * (per_epoch if self.unit == "epoch" else 1)
        return self.gamma ** ((step - 1) // period)


class CosineWarmup:
    """Rises linearly from 1/warmup_steps to 1, then falls along half a cosine to ``min_ratio`` (GPT-3, nanoGPT).

    Args:
        warmup_steps: Length of the linear part, in steps; None for the fraction ``warmup_ratio`` of the run.
        min_ratio: The factor at the end, in [0, 1].
        warmup_ratio: The linear part as a fraction of the run, in [0, 1].

    Raises:
        TrainingError: A number is outside of these ranges.
    """

    def __init__(self, warmup_steps: int | None = None, min_ratio: float = 0.1, warmup_ratio: float = 0.2) -> None:
        in_range = 0.0 <= min_ratio <= 1.0 and 0.0 <= warmup_ratio <= 1.0
        if (warmup_steps is not None and warmup_steps < 0) or not in_range:
            raise TrainingError(
                f"scheduler.warmup_steps={warmup_steps} must be 0 or more, and scheduler.min_ratio={min_ratio} and "
                f"scheduler.warmup_ratio={warmup_ratio} in [0, 1]"
            )
        self.warmup_steps, self.min_ratio, self.warmup_ratio = warmup_steps, min_ratio, warmup_ratio

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """Return the factor in [0, 1]; it is 1 at the end of the warm-up."""
        warmup = round(total * self.warmup_ratio) if self.warmup_steps is None else self.warmup_steps
        if step <= warmup:
            return step / warmup
        done = (step - 1 - warmup) / max(1, total - warmup)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
