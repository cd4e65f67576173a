"""Which updates are skipped: those with numbers that are not finite and, on request, those after a loss spike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import TrainingError
from data.batch import Batch
from models.chain import as_tuple
from parallel.sharding import local
from parallel.strategy import StepResult, Strategy
from training.checkpoint.files import Checkpoint
from training.checkpoint.load import load
from training.optimizer import Optimizer
from training.reporting.summary import Outcome

_FEWEST_LOSSES = 10  # before a loss can be called a spike
_NEW_WEIGHT = 0.05  # of a new loss in the running mean, which thus reaches back about twenty steps


class Skipping:
    """Decides after each step whether it counts. Every rank decides alike, from the numbers that all agree on.

    Attributes:
        skipped: The number of steps skipped so far.
        counted: The last step that counted. Checkpoints are of that step: those skipped since then are done again.
        place: Where the numbers of the last step first were not finite, in words; empty where that was not looked for.
    """

    def __init__(self, config: Any) -> None:
        """Take the section ``train`` of the configuration."""
        self._config = config
        self.skipped, self.counted, self.place = 0, 0, ""
        self._in_a_row = self._spikes_in_a_row = self._seen = 0
        self._mean = 0.0
        self._after_counted = self._state()

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

    def judge(self, step: int, result: StepResult, locate: Callable[[], str], scaled: bool = False) -> str:
        """Decide about a step.

        Args:
            step: The step's number.
            result: Its result.
            locate: Returns ``place``. Called for the first step that is skipped as not finite, and for one that ends
                the run.
            scaled: Whether the loss is scaled, so that gradients that are not finite are to be expected.

        Returns:
            Why its update is skipped, in words; empty if it is not.

        Raises:
            TrainingError: More than ``train.max_skipped`` steps in a row were skipped.
        """
        self.place = ""
        if result.usable:
            self._in_a_row = self._spikes_in_a_row = 0
            self._seen += 1
            self._mean += max(1 / self._seen, _NEW_WEIGHT) * (result.loss - self._mean)
            self.counted, self._after_counted = step, self._state()
            return ""
        self.skipped += 1
        self._in_a_row += 1
        self._spikes_in_a_row = self._spikes_in_a_row + 1 if result.spike else 0
        gives_up = self._in_a_row > self._config.max_skipped
        expected = scaled and math.isfinite(result.loss)
        if not result.finite and (gives_up or (self.skipped == 1 and not expected)):
            self.place = locate()
        if gives_up:
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
            f"step {step}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}, not finite {row}"
            f"{self.place and f', first in {self.place}'}; try {remedies}, or train.precision=fp32; "
            "debug=anomaly names the operation"
        )

    def check_any_counted(self, outcome: Outcome) -> None:
        """Raise TrainingError where a run has ended without a step that counted."""
        if self.counted == 0:
            raise TrainingError(
                f"no step counted: the updates of all {outcome.steps} steps were skipped, the last with loss "
                f"{outcome.final_loss:.4g}, so the weights are those of the start"
            )

    def roll_back(self, folder: Path, strategy: Strategy, optimizer: Optimizer) -> str:
        """Load weights and optimizer from the newest checkpoint. All ranks call it together.

        The caller continues with its next step: the batches in between are not read again.

        Args:
            folder: The run's ``checkpoints`` folder.
            strategy: The model.
            optimizer: Its optimizer.

        Returns:
            What was done, in words.
        """
        # Rank 0 looks for all: others may see an older state of a shared folder.
        found = Checkpoint.newest(folder) if strategy.mesh.rank == 0 else None
        newest = strategy.mesh.gather(found and str(found.folder))[0]
        if newest is None:
            return "the loss keeps jumping, and there is no checkpoint yet to go back to (train.checkpoint_every)"
        self.counted = load(Path(newest), strategy, optimizer).step
        return f"the loss keeps jumping: back to the weights of step {self.counted}, and on with the next batches"

    def state_dict(self) -> dict[str, float]:
        """Return what a run that is resumed after ``counted`` needs in order to decide as this one would."""
        return self._after_counted

    def _state(self) -> dict[str, float]:
        return {
            "skipped": self.skipped,
            "in_a_row": self._in_a_row,
            "spikes_in_a_row": self._spikes_in_a_row,
            "seen": self._seen,
            "mean": self._mean,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take the ``state_dict`` of the run that is resumed."""
        self.skipped = int(state["skipped"])
        self._in_a_row = int(state["in_a_row"])
        self._spikes_in_a_row = int(state["spikes_in_a_row"])
        self._seen = int(state["seen"])
        self._mean = float(state["mean"])
        self._after_counted = self._state()


def first_not_finite(strategy: Strategy, batch: Batch, step: int) -> str:
    """Do a step again, and look for the first numbers that are not finite. All ranks call it together.

    Gradients are new after it, everything else is as before.

    Args:
        strategy: The model.
        batch: The step's batch.
        step: Its number.

    Returns:
        What they are, and on which ranks, in words; empty where all that is looked at is finite.
    """
    place = {name: n for n, name in enumerate(strategy.chain.names)}
    found: list[tuple[int, int, str]] = []  # in the order of a step: forward or backward, the layer's place, in words

    def look_at_layer(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        kind = type(layer).__name__
        if not _finite(layer.parameters()):
            found.append((0, place[name], f"a weight of layer {name!r} ({kind})"))
        elif not _finite(as_tuple(output)):
            found.append((0, place[name], f"the output of layer {name!r} ({kind})"))
        for x in inputs:
            if x.requires_grad:
                words = f"the gradient that layer {name!r} ({kind}) gives"
                x.register_hook(partial(look_at_gradient, (1, -place[name], words)))

    def look_at_gradient(entry: tuple[int, int, str], gradient: Tensor) -> None:
        if not _finite([gradient]):
            found.append(entry)

    def look_at_loss(stage: nn.Module, inputs: Any, output: Any) -> None:
        if stage.ends_chain and not _finite(as_tuple(output)):
            found.append((0, len(place), "the loss"))

    handles = []
    for stage in strategy.stages:
        if stage.begins_chain and not _finite(batch.input_tensors):
            found.append((0, -1, "an input of the batch"))
        if stage.ends_chain and not _finite([batch.targets]):
            found.append((0, len(place) - 1, "a target of the batch"))
        handles.append(stage.register_forward_hook(look_at_loss))
        handles += [layer.register_forward_hook(partial(look_at_layer, name)) for name, layer in stage.layers.items()]
    try:
        with torch.compiler.set_stance("force_eager"):  # what is compiled already knows of no hooks
            strategy.train_step(batch, step)
    finally:
        for handle in handles:
            handle.remove()
    for stage in strategy.stages:  # averaged over replicas: no more is known of a layer's own gradients
        for name, layer in stage.layers.items():
            if not _finite(p.grad for p in layer.parameters() if p.grad is not None):
                found.append((2, -place[name], f"the gradient of layer {name!r} ({type(layer).__name__})"))
    firsts = strategy.mesh.gather(min(found, default=None))
    if not any(firsts):
        return ""
    first = min(entry for entry in firsts if entry)
    ranks = [rank for rank, entry in enumerate(firsts) if entry == first]
    where = f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if strategy.mesh.size > 1 else ""
    return first[2] + where


def _finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(local(x.detach()).isfinite().all()) for x in tensors)
