"""Which steps are left out: those whose numbers are not finite and, on request, those whose loss jumps."""

from __future__ import annotations

import math
from typing import Any

from common.errors import TrainingError
from parallel.strategy import StepResult

_SETTLED = 10  # so many losses must be known before one can be called a jump
_SHARE = 0.05  # of a new loss in the running mean, which so reaches back about twenty steps


class Skipping:
    """``config``: the section ``train``. Every rank decides alike, from the step's agreed numbers.

    skipped  how many steps were left out so far
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self.skipped = 0
        self._in_a_row = self._spikes_in_a_row = self._seen = 0
        self._mean = 0.0

    @property
    def loss_limit(self) -> float:
        """A step with a larger loss is a spike; infinite where none is looked for."""
        factor = self._config.spike_factor
        return math.inf if factor is None or self._seen < _SETTLED else factor * self._mean

    @property
    def rolls_back(self) -> bool:
        """Whether so many spikes came in a row that the weights are no longer to be trusted. Asked once."""
        enough = self._config.spike_rollback
        if enough is None or self._spikes_in_a_row < enough:
            return False
        self._spikes_in_a_row = 0
        return True

    def judge(self, step: int, result: StepResult) -> str:
        """Why the step is left out, in words; empty where it counts.

        Raises TrainingError where more than ``train.max_skipped`` in a row were.
        """
        if result.usable:
            self._in_a_row = self._spikes_in_a_row = 0
            self._seen += 1
            self._mean += max(1 / self._seen, _SHARE) * (result.loss - self._mean)
            return ""
        self.skipped += 1
        self._in_a_row += 1
        self._spikes_in_a_row = self._spikes_in_a_row + 1 if result.spike else 0
        if self._in_a_row > self._config.max_skipped:
            raise TrainingError(self._give_up(step, result))
        return "skipped: loss spike" if result.spike else "skipped: not finite"

    def _give_up(self, step: int, result: StepResult) -> str:
        row = f"for {self._in_a_row} steps in a row (train.max_skipped={self._config.max_skipped})"
        remedies = "a lower optim.lr, a longer warm-up, train.grad_clip=1.0"
        if result.spike:
            return (
                f"step {step}: loss {result.loss:.6g}, more than train.spike_factor={self._config.spike_factor:g} x "
                f"the mean of those before, {self._mean:.6g}, or not finite, {row}; try {remedies}, or a larger "
                "train.spike_factor"
            )
        return (
            f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}, not finite {row}; try {remedies}, or "
            "train.precision=fp32; debug=anomaly names the operation"
        )

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs, to decide as this one would."""
        return {
            "skipped": self.skipped,
            "in_a_row": self._in_a_row,
            "spikes_in_a_row": self._spikes_in_a_row,
            "seen": self._seen,
            "mean": self._mean,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.skipped = int(state["skipped"])
        self._in_a_row = int(state["in_a_row"])
        self._spikes_in_a_row = int(state["spikes_in_a_row"])
        self._seen = int(state["seen"])
        self._mean = float(state["mean"])
