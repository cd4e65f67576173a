"""The learning-rate schedules.

A schedule is a class with a method ``factor(step, total, per_epoch)``, which returns the factor on ``optim.lr`` for a
step, counted from 1, of ``total`` steps with ``per_epoch`` steps per epoch. It is a pure function, so that a schedule
has no state to resume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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


@dataclass
class WSD:
    """Rises from ``min_ratio`` to 1 (warm-up), stays there (stable), and falls to ``min_ratio`` at the end (decay).

    These are the rates of transformers' ``get_wsd_schedule``; in the warm-up, those of its next step. If
    ``warmup_steps`` is given, the rates before the decay do not depend on the length of the run.

    Args:
        warmup_steps: Length of the warm-up, in steps; None for the fraction ``warmup_ratio`` of the run.
        decay_steps: Length of the decay, in steps; None for the fraction ``decay_ratio`` of the run.
        min_ratio: The factor before the warm-up and after the decay, in [0, 1].
        decay_type: How the factor falls with the fraction x of the decay: 1 - x, half a cosine, or 1 - sqrt(x).
        warmup_ratio: The warm-up as a fraction of the run, in [0, 1].
        decay_ratio: The decay as a fraction of the run, in [0, 1]; at most what the warm-up leaves.

    Raises:
        TrainingError: A number is outside of these ranges.
    """

    warmup_steps: int | None = None
    decay_steps: int | None = None
    min_ratio: float = 0.0
    decay_type: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    warmup_ratio: float = 0.1
    decay_ratio: float = 0.2

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if key != "decay_type" and not 0 <= (value or 0) <= (1 if key.endswith("ratio") else math.inf):
                raise TrainingError(f"scheduler.{key}={value} must be 0 or more, and a ratio at most 1")

    def warmup(self, total: int) -> int:
        """Return the length of the warm-up in a run of ``total`` steps."""
        return round(total * self.warmup_ratio) if self.warmup_steps is None else self.warmup_steps

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """Return the factor in [``min_ratio``, 1]. Raises TrainingError if the run is too short for its parts."""
        warmup = self.warmup(total)
        left = max(0, total - warmup)
        decay = min(left, round(total * self.decay_ratio)) if self.decay_steps is None else self.decay_steps
        if decay > left:
            raise TrainingError(f"scheduler.decay_steps={decay} is more than the {left} steps after the warm-up")
        done = min(max(0.0, (step - 1 - total + decay) / max(1, decay)), 1.0)
        falls = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "1-sqrt": 1 - math.sqrt(done)}
        share = step / warmup if step <= warmup else falls[self.decay_type]
        return self.min_ratio + (1 - self.min_ratio) * share


class Linear(WSD):
    """Rises linearly to 1, then falls linearly to ``min_ratio``: transformers' ``get_linear_schedule_with_warmup``.

    See WSD for the arguments and the warm-up. In transformers, ``min_ratio`` is 0.
    """

    def __init__(self, warmup_steps: int | None = None, min_ratio: float = 0.0, warmup_ratio: float = 0.1) -> None:
        super().__init__(warmup_steps, None, min_ratio, "linear", warmup_ratio, 1.0)


class CosineWarmup(WSD):
    """Rises linearly from 1/warmup_steps to 1, then falls along half a cosine to ``min_ratio`` (GPT-3, nanoGPT).

    See WSD for the arguments.
    """

    def __init__(self, warmup_steps: int | None = None, min_ratio: float = 0.1, warmup_ratio: float = 0.2) -> None:
        super().__init__(warmup_steps, None, min_ratio, "cosine", warmup_ratio, 1.0)

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """Return the factor in [0, 1]; it is 1 at the end of the warm-up."""
        warmup = self.warmup(total)
        return step / warmup if step <= warmup else super().factor(step, total, per_epoch)
