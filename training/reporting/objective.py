"""What a sweep compares its jobs by: a number of each job, and which way it is better."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import TrainingError
from training.reporting.metrics import METRICS, SUMMARY, read_object, read_records

TIME, LOSS, TRAINING_LOSS = "step_time_s", "val_loss", "final_loss"

# Keys, and sections with all their keys.
_SPEED = (
    "parallel", "launcher", "device", "logger", "loggers", "hydra", "data.num_workers", "data.cache_dir",
    *(f"train.{key}" for key in ("compile", "activation_checkpointing", "precision", "deterministic", "tf32")),
    "train.cudnn_benchmark", "train.profile", "train.trace",
)  # fmt: skip
# Jobs are compared with those of the same model, and another seed is the same question once more.
_NEITHER = ("model", "seed")
_LARGER_IS_BETTER = re.compile(r"accuracy|_per_s$|(^|_)(f1|auc|precision|recall|top\d+)($|_)")
_SUMMARISED = (
    LOSS, "test_loss", TRAINING_LOSS, "first_loss", TIME, "samples_per_s", "tokens_per_s", "peak_memory_bytes",
    "bubble_fraction",
)  # fmt: skip


@dataclass(frozen=True)
class Objective:
    """A number that every finished job has.

    Attributes:
        name: A number of summary.json, or a metric of the validation such as val_accuracy. "val_loss" is the best.
        larger_is_better: Whether the largest is the best.
    """

    name: str
    larger_is_better: bool

    @property
    def title(self) -> str:
        """The objective as the label of an axis."""
        return {LOSS: "best validation loss", TRAINING_LOSS: "training loss of the last step"}.get(self.name, self.name)

    def of(self, folder: Path) -> float | None:
        """Return the number of the run in ``folder``; None where it has none."""
        summary = read_object(folder / SUMMARY)
        value = summary.get("best_val_loss" if self.name == LOSS else self.name)
        if isinstance(value, list):  # one number per rank
            value = sum(value)
        if value is None and self.name.startswith("val_"):
            values = filter(_is_number, (record.get(self.name) for record in read_records(folder / METRICS)))
            value = (max if self.larger_is_better else min)(values, default=None)
        return float(value) if _is_number(value) else None


def objective(
    name: str | None, keys: Sequence[str], folders: Sequence[Path], direction: str | None = None
) -> Objective:
    """Choose what to compare jobs by.

    Args:
        name: ``sweep.objective``; None: the time per step where only settings of speed vary, else the validation loss,
            or the training loss where nothing was validated.
        keys: The overrides that vary.
        folders: The directories of the jobs.
        direction: "minimize" or "maximize"; None: by the name, so that more accuracy and more speed are better.
    """
    if name is None:
        compared = [key for key in keys if key not in _NEITHER]
        name = TIME if compared and all(map(is_of_speed, compared)) else LOSS
        if name == LOSS and all(Objective(LOSS, False).of(folder) is None for folder in folders):
            name = TRAINING_LOSS
    larger = bool(_LARGER_IS_BETTER.search(name)) if direction is None else direction == "maximize"
    return Objective(name, larger)


def is_of_speed(key: str) -> bool:
    """Return whether an override of ``key`` changes how fast a model is trained, and not what is learned."""
    return any(key == name or key.startswith(f"{name}.") for name in _SPEED)


def value_for_sweeper(cfg: Any, folder: Path) -> float | None:
    """Return what a finished job tells a sweeper that chooses the next ones; None where it has not trained.

    Raises:
        TrainingError: ``sweep.objective`` is none of the run's numbers.
    """
    chosen = objective(cfg.sweep.objective, (), [folder])
    value = chosen.of(folder)
    if value is None and cfg.sweep.objective is not None and cfg.mode == "train":
        raise TrainingError(
            f"sweep.objective={chosen.name} is not among the numbers in {folder} (summary.json, metrics.jsonl); was "
            "the run evaluated? train.eval_every=0 evaluates at the end"
        )
    return value


def check_objective(name: str | None, metrics: Sequence[str], language: bool) -> None:
    """Check ``sweep.objective`` before a run, whose loss has ``metrics`` and, of ``language``, a perplexity.

    Raises:
        TrainingError: No run has such a number.
    """
    own = [*metrics, *["perplexity"] * language]
    known = [*_SUMMARISED, *(f"{split}_{metric}" for split in ("val", "test") for metric in own)]
    if name is not None and name not in known:
        raise TrainingError(f"sweep.objective={name} is not a number of this run, which has {', '.join(known)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
