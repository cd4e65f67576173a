"""Which updates are skipped: those with numbers that are not finite and, on request, those after a loss spike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from common.errors import TrainingError
from parallel.strategy import StepResult, Strategy
from training import checkpoint
from training.optimizer import Optimizer

_FEWEST_LOSSES = 10  # before a loss can be called a spike
_NEW_WEIGHT = 0.05  # of a new loss in the running mean, which thus reaches back about twenty steps


class Skipping:
    """Decides after each step whether it counts. Every rank decides alike, from the numbers that all agree on.

    Attributes:
        skipped: The number of steps skipped so far.
    """

    def __init__(self, config: Any) -> None:
        """Takes the section ``train`` of the configuration."""
        self._config = config
        self.skipped = 0
        self._in_a_row = self._spikes_in_a_row = self._seen = 0
        self._mean = 0.0

    @property
    def loss_limit(self) -> float:
        """The largest loss that is no spike; infinite while no spike is looked for."""
        factor = self._config.spike_factor
        return math.inf if factor is None or self._seen < _FEWEST_LOSSES else factor * self._mean

    @property
    def rolls_back(self) -> bool:
        """Whether ``train.spike_rollback`` spikes came in a row. True once for each such row."""
        enough = self._config.spike_rollback
        if enough is None or self._spikes_in_a_row < enough:
            return False
        self._spikes_in_a_row = 0
        return True

    def judge(self, step: int, result: StepResult) -> str:
        """Decides about a step.

        Args:
            step: The step's number.
            result: Its result.

        Returns:
            Why its update is skipped, in words; empty if it is not.

        Raises:
            TrainingError: More than ``train.max_skipped`` steps in a row were skipped.
        """
        if result.usable:
            self._in_a_row = self._spikes_in_a_row = 0
            self._seen += 1
            self._mean += max(1 / self._seen, _NEW_WEIGHT) * (result.loss - self._mean)
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
            f"step {step}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}, not finite {row}; try "
            f"{remedies}, or train.precision=fp32; debug=anomaly names the operation"
        )

    def state_dict(self) -> dict[str, float]:
        """Returns what a resumed run needs in order to decide as this one would."""
        return {
            "skipped": self.skipped,
            "in_a_row": self._in_a_row,
            "spikes_in_a_row": self._spikes_in_a_row,
            "seen": self._seen,
            "mean": self._mean,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes the ``state_dict`` of the run that is resumed."""
        self.skipped = int(state["skipped"])
        self._in_a_row = int(state["in_a_row"])
        self._spikes_in_a_row = int(state["spikes_in_a_row"])
        self._seen = int(state["seen"])
        self._mean = float(state["mean"])


def roll_back(folder: Path, strategy: Strategy, optimizer: Optimizer) -> tuple[int | None, str]:
    """Loads weights and optimizer from the newest checkpoint. All ranks call it together.

    The caller continues with its next step: the batches in between are not read again.

    Args:
        folder: The run's ``checkpoints`` folder.
        strategy: The model.
        optimizer: Its optimizer.

    Returns:
        The step whose weights these are, None where there is no checkpoint; and what was done, in words.
    """
    # Rank 0 looks for all: others may see an older state of a shared folder.
    found = checkpoint.newest(folder) if strategy.mesh.rank == 0 else None
    newest = strategy.mesh.gather(found and str(found))[0]
    if newest is None:
        return None, "the loss keeps jumping, and there is no checkpoint yet to go back to (train.checkpoint_every)"
    step = checkpoint.load(Path(newest), strategy, optimizer)
    return step, f"the loss keeps jumping: back to the weights of step {step}, and on with the next batches"
