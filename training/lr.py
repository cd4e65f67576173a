"""Learning-rate schedules as pure functions of the step: resuming needs no state of theirs.

Each gives the factor on ``optim.lr`` for a step, counted from 1, of ``total`` steps with ``per_epoch`` to an epoch.
"""

from __future__ import annotations

import math

from common.errors import TrainingError


class Constant:
    """The same rate throughout."""

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        return 1.0


class Step:
    """Multiplied by ``gamma`` after every ``every`` epochs or steps (torch's StepLR)."""

    def __init__(self, every: int, unit: str, gamma: float) -> None:
        if every < 1:
            raise TrainingError(f"scheduler.every={every} must be at least 1")
        self.every, self.unit, self.gamma = every, getattr(unit, "value", unit), gamma

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        period = self.every * (per_epoch if self.unit == "epoch" else 1)
        return self.gamma ** ((step - 1) // period)


class CosineWarmup:
    """Linear from 1/warmup_steps to 1, then half a cosine down to ``min_ratio`` (GPT-3's schedule, as in nanoGPT).

    ``warmup_steps`` None: a fifth of the run.
    """

    def __init__(self, warmup_steps: int | None, min_ratio: float) -> None:
        if (warmup_steps is not None and warmup_steps < 0) or not 0.0 <= min_ratio <= 1.0:
            raise TrainingError(
                f"scheduler.warmup_steps={warmup_steps} must be 0 or more and scheduler.min_ratio={min_ratio} in [0, 1]"
            )
        self.warmup_steps, self.min_ratio = warmup_steps, min_ratio

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        warmup = total // 5 if self.warmup_steps is None else self.warmup_steps
        if step <= warmup:
            return step / warmup
        done = (step - 1 - warmup) / max(1, total - warmup)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
