"""Which steps count: those with numbers that are not finite are skipped and, on request, loss spikes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import TrainingError
from parallel.strategy import StepResult, Strategy
from training.checkpoint.files import Checkpoint
from training.checkpoint.load import load_chosen
from training.optimizer import Optimizer
from training.reporting.summary import Outcome
from training.run.evaluate import IGNORED_TARGETS

_FEWEST_LOSSES = 10  # losses in the running mean before another one can be a spike
_NEW_WEIGHT = 0.05  # of a new loss in the running mean, which thus covers about twenty steps


class Skipping:
    """Decides after each step whether it counts. All ranks decide the same, from numbers that are equal on all ranks.

    A step in which no target counts has the loss 0/0, which says nothing about the weights. It neither counts as a step
    that is not finite nor interrupts a row of such steps.

    Attributes:
        skipped: The number of steps skipped so far.
        counted: The last step that counted. Checkpoints have its number: steps skipped since then are repeated.
        in_a_row: The number of consecutive steps, up to the newest, that were skipped because of their numbers.
        spikes_in_a_row: The number of consecutive steps, up to the newest, that were skipped because of a loss spike.
        empty_in_a_row: The number of consecutive steps, up to the newest, in which no target counted.
        seen: The number of losses in ``mean``.
        mean: The running mean of the losses of steps that counted.
        note: The end of a sentence about the last step, for the first step of each kind that is skipped; else empty.
    """

    def __init__(self, config: Any) -> None:
        """Keep ``config``, the section ``train`` of the configuration."""
        self._config = config
        self.skipped = self.counted = self.seen = self._skipped_before = 0  # the last one: up to ``counted``
        self.in_a_row = self.spikes_in_a_row = self.empty_in_a_row = 0
        self.mean, self.note = 0.0, ""
        self._located = self._explained = False

    @property
    def loss_limit(self) -> float:
        """The largest loss that is not a spike; infinite if spikes are not detected, or if the mean is not positive."""
        factor = self._config.spike_factor
        if factor is None or self.seen < _FEWEST_LOSSES or self.mean <= 0:  # a multiple of a negative mean is below it
            return math.inf
        return factor * self.mean

    @property
    def rolls_back(self) -> bool:
        """Whether ``train.spike_rollback`` spikes came in a row since the last ``roll_back``."""
        enough = self._config.spike_rollback
        return enough is not None and self.spikes_in_a_row >= enough

    def judge(self, step: int, result: StepResult, locate: Callable[[], str], scaled: bool = False) -> str:
        """Decide whether a step counts.

        Args:
            step: The step's number.
            result: Its result.
            locate: Returns where numbers first were not finite, in words. Called for the first step that is skipped
                because of them, and for a step that ends the run.
            scaled: Whether the loss is scaled, so that gradients that are not finite are to be expected.

        Returns:
            The reason why its update is skipped; empty if it is not.

        Raises:
            TrainingError: More than ``train.max_skipped`` steps in a row were skipped.
        """
        self.note, most = "", self._config.max_skipped
        if result.usable:
            self.in_a_row = self.spikes_in_a_row = self.empty_in_a_row = 0
            self.seen += 1
            self.mean += max(1 / self.seen, _NEW_WEIGHT) * (result.loss - self.mean)
            self.counted, self._skipped_before = step, self.skipped
            return ""
        self.skipped += 1
        if not result.terms:
            self.empty_in_a_row += 1
            if self.empty_in_a_row > most:
                row = f"for {self.empty_in_a_row} steps in a row (train.max_skipped={most})"
                raise TrainingError(f"step {step}: no target counts {row}: {IGNORED_TARGETS}")
            self.note, self._explained = "" if self._explained else f": {IGNORED_TARGETS}", True
            return "skipped: no target counts"
        self.empty_in_a_row = 0
        self.in_a_row += 1
        self.spikes_in_a_row = self.spikes_in_a_row + 1 if result.spike else 0
        gives_up = self.in_a_row > most
        expected = scaled and math.isfinite(result.loss)
        if not result.finite and (gives_up or not (self._located or expected)):
            place, self._located = locate(), True
            self.note = place and f", first in {place}"
        if gives_up:
            raise TrainingError(self._give_up(step, result))
        return "skipped: loss spike" if result.spike else "skipped: not finite"

    def _give_up(self, step: int, result: StepResult) -> str:
        row = f"for {self.in_a_row} steps in a row (train.max_skipped={self._config.max_skipped})"
        remedies = "a lower optim.lr, a longer warm-up, train.grad_clip=1.0"
        if result.spike:
            return (
                f"step {step}: loss {result.loss:.6g}, more than train.spike_factor={self._config.spike_factor:g} x "
                f"the mean of those before, {self.mean:.6g}, or not finite, {row}; try {remedies}, or a larger "
                "train.spike_factor"
            )
        return (
            f"step {step}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}, not finite {row}"
            f"{self.note}; try {remedies}, or train.precision=fp32; debug=anomaly names the operation"
        )

    def check_any_counted(self, outcome: Outcome) -> None:
        """Raise TrainingError if a run has ended without a step that counted."""
        if self.counted == 0:
            if outcome.final_loss is None:
                why = f"as no target counts in any: {IGNORED_TARGETS}"
            else:
                why = f"the last with loss {outcome.final_loss:.4g}, so the weights are those of the start"
            raise TrainingError(f"no step counted: the updates of all {outcome.steps} steps were skipped, {why}")

    def roll_back(self, folder: Path, strategy: Strategy, optimizer: Optimizer) -> str:
        """Load weights and optimizer from the newest checkpoint. All ranks call this together.

        The caller continues with its next step: the batches in between are not read again.

        Returns:
            A description of what was done.
        """
        self.spikes_in_a_row = 0
        newest = load_chosen(lambda: Checkpoint.newest(folder, verify=True), strategy, optimizer)
        if newest is None:
            return "the loss keeps jumping, and there is no checkpoint yet to go back to (train.checkpoint_every)"
        self.counted = newest.step
        return f"the loss keeps jumping: back to the weights of step {self.counted}, and on with the next batches"

    def state_dict(self) -> dict[str, float]:
        """Return the state with which a run that is resumed after ``counted`` decides as this one: no row is open."""
        return {"skipped": self._skipped_before, "seen": self.seen, "mean": self.mean}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the ``state_dict`` of the run that is resumed."""
        self.skipped = self._skipped_before = int(state["skipped"])
        self.seen, self.mean = int(state["seen"]), float(state["mean"])
