"""The schedule that lowers the learning rate when evaluations no longer improve (torch's ReduceLROnPlateau)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from common.errors import TrainingError
from training.callbacks import Callback, TrainingRun
from training.reporting.monitor import Monitor

_KEPT = ("best", "num_bad_epochs", "cooldown_counter")  # torch's state


class Plateau(Callback):
    """A schedule by the number of ``train.monitor`` after each evaluation. An evaluation is one of torch's epochs."""

    def __init__(
        self,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        """Check the numbers. The arguments are those of ``torch.optim.lr_scheduler.ReduceLROnPlateau``.

        Raises:
            TrainingError: A number is out of range.
        """
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        if not 0 < factor < 1 or min(patience, threshold, cooldown, min_lr, eps) < 0:
            raise TrainingError(
                f"scheduler.factor={factor} must be between 0 and 1, and scheduler.patience={patience}, "
                f"threshold={threshold}, cooldown={cooldown}, min_lr={min_lr} and eps={eps} 0 or more"
            )
        self._factor, self._state = 1.0, {}

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """Return the present factor; it depends on the evaluations so far only."""
        return self._factor

    def on_evaluation(self, run: TrainingRun, record: Mapping[str, Any]) -> None:
        """Compare a result with the best so far. Every rank has the same numbers, and so the same factor."""
        monitor, lr = Monitor.of(run.cfg.train), run.cfg.optim.lr
        compared = [monitor.name, monitor.direction, run.evaluation]
        if self._state.get("compared") != compared:  # the best result of another metric or of other data says nothing
            self._state = {}
        optimizer = torch.optim.SGD([torch.zeros(())], lr=lr * self._factor)
        schedule = ReduceLROnPlateau(optimizer, "min" if monitor.sign > 0 else "max", **self._arguments)
        vars(schedule).update(self._state)
        schedule.step(record[monitor.name])
        self._state = {"compared": compared, **{key: getattr(schedule, key) for key in _KEPT}}
        self._factor = optimizer.param_groups[0]["lr"] / lr if lr else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the factor, torch's state, and the compared metric and data."""
        return {"factor": self._factor, **self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Callback``."""
        self._factor = state["factor"]
        # JSON has no infinity.
        self._state = {key: state[key] for key in ("compared", *_KEPT) if state.get(key) is not None}
