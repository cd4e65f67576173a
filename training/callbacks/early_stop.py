"""Stops the training when the validation result no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from common.errors import TrainingError
from training.callbacks import Callback, TrainingRun
from training.reporting.monitor import Monitor

_KEYS = ("callbacks.early_stop.metric", "callbacks.early_stop.direction")


class EarlyStop(Callback):
    """Ends the training after ``patience`` evaluations in a row without a better result. Use checkpoint ``best``."""

    def __init__(
        self,
        metric: str | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
        direction: Literal["minimize", "maximize"] | None = None,
    ) -> None:
        """Check the numbers.

        Args:
            metric: A number of every evaluation, such as val_accuracy; None for ``train.monitor``.
            patience: Number of evaluations without a better result, after which the training stops.
            min_delta: Minimum difference from the best result that counts as better.
            direction: Whether less or more is better; None to decide by the metric's name.

        Raises:
            TrainingError: A number is out of range.
        """
        if patience < 1 or min_delta < 0:
            raise TrainingError(f"early_stop: patience={patience} must be at least 1, min_delta={min_delta} 0 or more")
        self.metric, self.patience, self.min_delta, self.direction = metric, patience, min_delta, direction
        self.best, self.since = math.inf, 0
        self._compared: tuple | None = None  # the metric, its sign and the digest of the evaluation, once known

    def monitor(self, train: Any) -> Monitor:
        """Return the metric that a run with this section ``train`` compares. Raises TrainingError."""
        return Monitor.of(train, self.metric, self.direction, _KEYS)

    def on_evaluation(self, run: TrainingRun, record: Mapping[str, Any]) -> None:
        """Compare the result with the best so far. Every rank has the same numbers, so all ranks stop together."""
        monitor = self.monitor(run.cfg.train)
        name, sign, _ = compared = monitor.name, monitor.sign, run.evaluation
        if self._compared not in (None, compared):  # the best result of another metric or of other data says nothing
            self.best, self.since = math.inf, 0
        self._compared, value = compared, sign * record[name]
        if value < self.best - self.min_delta:
            self.best, self.since = value, 0
            return
        self.since += 1
        if self.since >= self.patience:
            run.stop(f"{name} has not been better than {sign * self.best:.4g} for {self.since} evaluations")

    def state_dict(self) -> dict[str, Any]:
        """Return the best result so far, the number of evaluations since, and the compared metric and data."""
        best = self.best if math.isfinite(self.best) else None
        metric, sign, evaluation = self._compared or (None, None, None)
        return {"best": best, "since": self.since, "metric": metric, "sign": sign, "evaluation": evaluation}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Callback``."""
        known = (state.get("metric"), state.get("sign"), state.get("evaluation"))
        self._compared = None if None in known else known  # an older checkpoint lacks some
        self.best, self.since = math.inf if state["best"] is None else state["best"], state["since"]
