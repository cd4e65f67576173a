"""Stops the training when the validation result no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from common.errors import TrainingError
from training.callbacks import Callback, TrainingRun


class EarlyStop(Callback):
    """Ends the training after some evaluations in a row without a better result; ``best`` is the checkpoint to use."""

    def __init__(
        self,
        metric: str = "val_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        direction: Literal["minimize", "maximize"] = "minimize",
    ) -> None:
        """Check the numbers.

        Args:
            metric: A number of every evaluation, such as val_loss or val_accuracy.
            patience: Evaluations without a better result after which to stop.
            min_delta: By how much a result must be better to count.
            direction: Whether less or more is better.

        Raises:
            TrainingError: A number is out of range.
        """
        if patience < 1 or min_delta < 0:
            raise TrainingError(f"early_stop: patience={patience} must be at least 1, min_delta={min_delta} 0 or more")
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.sign = 1 if direction == "minimize" else -1
        self.best, self.since = math.inf, 0

    def on_evaluation(self, run: TrainingRun, record: Mapping[str, Any]) -> None:
        """Compare with the best so far. Every rank has the same numbers, so all stop together."""
        if self.metric not in record:
            have = ", ".join(name for name in record if name != "step")
            raise TrainingError(f"early_stop: {self.metric} is not in the evaluation, which has {have}")
        value = self.sign * record[self.metric]
        if value < self.best - self.min_delta:
            self.best, self.since = value, 0
            return
        self.since += 1
        if self.since >= self.patience:
            run.stop(f"{self.metric} has not been better than {self.sign * self.best:.4g} for {self.since} evaluations")

    def state_dict(self) -> dict[str, Any]:
        """Return the best result so far, the number of evaluations since, and what was compared."""
        best = self.best if math.isfinite(self.best) else None
        return {"best": best, "since": self.since, "metric": self.metric, "sign": self.sign}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Callback``. The best result of another metric or direction says nothing about this one."""
        if (state.get("metric", self.metric), state.get("sign", self.sign)) != (self.metric, self.sign):
            return
        self.best, self.since = math.inf if state["best"] is None else state["best"], state["since"]
