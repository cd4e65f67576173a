"""Decides which steps count. Steps with numbers that are not finite are skipped and, on request, loss spikes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from common.errors import TrainingError
from parallel.step_result import StepResult
from training.reporting.summary import Outcome
from training.run.evaluate import IGNORED_TARGETS

_FEWEST_LOSSES = 10  # losses in the running mean before another one can be a spike
_NEW_WEIGHT = 0.05  # of a new loss in the running mean, which therefore covers about twenty steps

# The reasons to skip a step.
_EMPTY, _SPIKE, _NOT_FINITE = "no target counts", "loss spike", "not finite"


class Skipping:
    """Decides after each step whether it counts. All ranks decide the same, from numbers that are equal on all ranks.

    A step is skipped because no target counts, because its loss is a spike, or because a number is not finite. A step
    in which no target counts has the loss 0/0, which says nothing about the weights; these steps are counted apart.

    Attributes:
        skipped: The number of steps skipped so far.
        counted: The last step that counted. Checkpoints have its number: a resumed run repeats the steps skipped since.
        row: The number of steps skipped since ``counted``, by reason.
        rolls_back: Whether the last step was the last of ``train.spike_rollback`` spikes.
        losses_averaged: The number of losses in ``mean``.
        mean: The running mean of the losses of steps that counted.
        note: The end of a sentence about the last step if it is the first one skipped for its reason; otherwise empty.
    """

    def __init__(self, config: Any) -> None:
        """Keep ``config``, the section ``train`` of the configuration."""
        self._config = config
        self.skipped = self.counted = self.losses_averaged = 0
        self.row = Counter[str]()
        self.mean, self.note, self.rolls_back = 0.0, "", False
        self._explained: set[str] = set()

    @property
    def loss_limit(self) -> float:
        """The largest loss that is not a spike; infinite if spikes are not detected, or if the mean is not positive."""
        factor = self._config.spike_factor
        # A multiple of a negative mean is below it.
        if factor is None or self.losses_averaged < _FEWEST_LOSSES or self.mean <= 0:
            return math.inf
        return factor * self.mean

    def judge(self, step: int, result: StepResult, locate: Callable[[], str], scaled: bool = False) -> str:
        """Decide whether a step counts.

        Args:
            step: The step's number.
            result: The step's result.
            locate: Returns a phrase that names the first numbers that are not finite. Called for the first step that is
                skipped because of such numbers, and for a step that ends the run.
            scaled: Whether the loss is scaled. Gradients that are not finite are then expected.

        Returns:
            The reason why the step's update is skipped; empty if the step counts.

        Raises:
            TrainingError: More than ``train.max_skipped`` steps in a row were skipped.
        """
        self.note, self.rolls_back = "", False
        if result.usable:
            self.row.clear()
            self.losses_averaged += 1
            self.mean += max(1 / self.losses_averaged, _NEW_WEIGHT) * (result.loss - self.mean)
            self.counted = step
            return ""
        reason = _EMPTY if not result.terms else _SPIKE if result.spike else _NOT_FINITE
        self.skipped += 1
        self.row[reason] += 1
        self.rolls_back = reason == _SPIKE and self.row[_SPIKE] % (self._config.spike_rollback or math.inf) == 0
        length = self.row[_EMPTY] if reason == _EMPTY else self.row[_SPIKE] + self.row[_NOT_FINITE]
        ends, expected = length > self._config.max_skipped, scaled and math.isfinite(result.loss)
        if not result.finite and (ends or not (reason in self._explained or expected)):
            self._explained.add(reason)
            if reason == _EMPTY:
                self.note = f": {IGNORED_TARGETS}"
            elif place := locate():
                self.note = f", first in {place}"
        if ends:
            row = f"for {length} steps in a row (train.max_skipped={self._config.max_skipped})"
            raise TrainingError(f"step {step}: {self._describe(reason, result, row)}")
        return f"skipped: {reason}"

    def _describe(self, reason: str, result: StepResult, row: str) -> str:
        remedies = "a lower optim.lr, a longer warm-up, train.grad_clip=1.0"
        if reason == _EMPTY:
            return f"{reason} {row}{self.note}"
        if reason == _SPIKE:
            return (
                f"loss {result.loss:.6g}, more than train.spike_factor={self._config.spike_factor:g} x the mean of "
                f"those before, {self.mean:.6g}, or not finite, {row}; try {remedies}, or a larger train.spike_factor"
            )
        return (
            f"loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}, {reason} {row}{self.note}; try {remedies}, "
            "or train.precision=fp32; debug=anomaly names the operation"
        )

    def check_any_counted(self, outcome: Outcome) -> None:
        """Raise TrainingError if a run has ended without a step that counted."""
        if self.counted == 0:
            if outcome.final_loss is None:
                why = f"as no target counts in any: {IGNORED_TARGETS}"
            else:
                why = f"the last with loss {outcome.final_loss:.4g}, so the weights are those of the start"
            raise TrainingError(f"no step counted: the updates of all {outcome.steps} steps were skipped, {why}")

    def state_dict(self) -> dict[str, float]:
        """Return the state with which a run resumed after ``counted`` decides as this one. The open row is left out."""
        return {"skipped": self.skipped - self.row.total(), "seen": self.losses_averaged, "mean": self.mean}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the ``state_dict`` of the resumed run."""
        self.skipped = int(state["skipped"])
        self.losses_averaged, self.mean = int(state["seen"]), float(state["mean"])
