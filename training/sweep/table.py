"""The rows of a sweep: what each job was, how it ended, how long its steps took, and how jobs compare."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import TrainingError
from parallel.strategies import names_where
from training.reporting.job_record import FINISHED, Job, label, read_jobs, short, swept_keys, values
from training.reporting.metrics import METRICS, SUMMARY, after_warmup, flat, read_object, read_records

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
PERCENTILES = (10, 50, 90)
ENOUGH_STEPS = 10  # after the warm-up: of fewer, the percentiles are the fastest and the slowest step
_SHOWN = (TIME, "val_loss", "final_loss", "samples_per_s", "tokens_per_s", "peak_memory_bytes", "bubble_fraction")


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, eq=False)
class Row:
    """One job and what it has left in its directory.

    Attributes:
        job: The job's record.
        folder: The job's directory.
        label: The overrides that distinguish it from the other jobs.
        values: All its overrides by key.
        summary: The contents of summary.json; empty unless the job has finished.
        times: Seconds of each step after the warm-up.
        curve: The step and the training loss of every step.
    """

    job: Job
    folder: Path
    label: str
    values: dict[str, str]
    summary: dict[str, Any]
    times: list[float]
    curve: list[tuple[int, float]]

    @property
    def finished(self) -> bool:
        """Whether the job has finished without an error."""
        return self.job.status == FINISHED

    @property
    def model(self) -> str | None:
        """The name of its model; None unless the job has finished."""
        return self.summary.get("model")

    @cached_property
    def step_times(self) -> np.ndarray | None:
        """The 10th, 50th and 90th percentile of seconds per step; None unless the job has finished and trained."""
        return np.percentile(self.times, PERCENTILES) if self.finished and self.times else None

    @property
    def batch(self) -> int:
        """Samples per step; 0 where the summary does not say."""
        return round((self.summary.get("samples_per_s") or 0) * (self.summary.get("step_time_s") or 0))

    @property
    def problem(self) -> str:
        """Why there is no result, in one line; empty for a finished job."""
        if self.finished:
            return ""
        lines = [line for line in (self.job.error or "").splitlines() if line.strip()]
        if not lines:
            return {"waiting": "not started", "running": "no end is recorded"}.get(self.job.status, "")
        starts = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        if not starts:
            return lines[0].strip()
        # The error follows the last frame; after it come its further lines and notes.
        said = [line for line in lines[starts[-1] + 1 :] if not line.startswith(" ")]
        return said[0].removeprefix("common.errors.") if said else lines[-1].strip()

    @property
    def status(self) -> str:
        """The job's status, with the reason where there is no result, and with the steps that did not count."""
        if skipped := self.summary.get("skipped_steps"):
            return f"{self.job.status}, {skipped} of {self.summary['steps']} steps skipped"
        return f"{self.job.status}: {self.problem}".removesuffix(": ")


@dataclass(frozen=True)
class Table:
    """All jobs of a sweep.

    Attributes:
        folder: The sweep's directory.
        keys: The overrides whose values differ between jobs, in their order.
        rows: One row per job, by number.
        objective: What jobs are compared by.
    """

    folder: Path
    keys: list[str]
    rows: list[Row]
    objective: Objective

    @property
    def by_time(self) -> bool:
        """Whether the objective is the time per step, or per sample."""
        return self.objective.name == TIME

    @property
    def by_speed(self) -> bool:
        """Whether the objective is the time per step or follows from it."""
        return self.objective.name in (TIME, "samples_per_s", "tokens_per_s")

    @cached_property
    def per_sample(self) -> bool:
        """Whether costs are times per sample, as the jobs' steps are of different sizes."""
        batches = {row.batch for row in self.rows if row.step_times is not None}
        return len(batches) > 1 and 0 not in batches

    def costs(self, row: Row) -> np.ndarray:
        """Return the 10th, 50th and 90th percentile of seconds per step, or per sample, of a row that was timed."""
        return row.step_times / (row.batch if self.per_sample else 1)

    @cached_property
    def scores(self) -> dict[Row, float]:
        """The objective of each job that has it."""
        if self.by_time:
            return {row: float(self.costs(row)[1]) for row in self.rows if row.step_times is not None}
        found = {row: self.objective.of(row.folder) for row in self.rows if row.finished}
        return {row: score for row, score in found.items() if score is not None}

    @cached_property
    def best(self) -> list[Row]:
        """The best job of each model of which several jobs have a score."""
        choose = max if self.objective.larger_is_better else min
        models = dict.fromkeys(row.model for row in self.scores)
        groups = [[row for row in self.scores if row.model == model] for model in models]
        return [choose(rivals, key=self.scores.get) for rivals in groups if len(rivals) > 1]

    def rivals(self, row: Row) -> list[Row]:
        """Return the scored rows of the same model as ``row``, itself included."""
        return [other for other in self.scores if other.model == row.model]

    def overlapping(self, row: Row) -> list[Row]:
        """Return the rivals of ``row``, the fastest, whose spread and its own overlap: they may be as fast."""
        high = self.costs(row)[2]
        return [other for other in self.rivals(row) if other is not row and self.costs(other)[0] <= high]

    @cached_property
    def references(self) -> dict[Row, Row]:
        """What the losses of each job are compared with that trains the same as others: ``single``, or the first."""
        alone = names_where(stages=False, replicas=False, gpu_only=False)
        groups: dict[tuple, list[Row]] = {}
        for row in self.rows:
            if row.finished and row.curve:
                learned = tuple(row.values.get(key) for key in self.keys if not is_of_speed(key))
                groups.setdefault(learned, []).append(row)
        return {
            row: next((other for other in rows if other.summary.get("parallel") in alone), rows[0])
            for rows in groups.values()
            if len(rows) > 1
            for row in rows
        }

    def loss_difference(self, row: Row) -> float | None:
        """Return the largest of |loss - reference's| / |reference's| over the steps; infinite where those are others.

        None without a reference, or for the reference itself.
        """
        reference = self.references.get(row, row)
        if reference is row:
            return None
        (steps, losses), (others, expected) = (np.array(curve).T for curve in (row.curve, reference.curve))
        if not np.array_equal(steps, others):
            return float("inf")
        return float((np.abs(losses - expected) / np.maximum(np.abs(expected), np.finfo(float).tiny)).max())

    def show_score(self, row: Row) -> str:
        """Format the score of a row that has one."""
        return seconds(self.scores[row]) if self.by_time else f"{self.scores[row]:.4g}"

    @cached_property
    def cells(self) -> dict[Row, dict[str, str]]:
        """The overrides and results of each row as texts, by column; columns that no row fills are left out."""
        cells = {row: self._results(row) for row in self.rows}
        filled = [title for title in cells[self.rows[0]] if any(results[title] for results in cells.values())]
        return {
            row: {
                **{key: short(row.values.get(key, "")) for key in self.keys},
                "status": row.status,
                **{title: results[title] for title in filled},
            }
            for row, results in cells.items()
        }

    def _results(self, row: Row) -> dict[str, str]:
        low, median, high = (None, None, None) if row.step_times is None else row.step_times
        difference, ranks = self.loss_difference(row), row.summary.get("peak_memory_bytes")
        compared = {None: "", float("inf"): "other steps"}.get(difference, f"{difference or 0:.1g}")
        results = {
            "time per step": seconds(median),
            "10–90 %": _range(low, high),
            "samples/s": _number(row, "samples_per_s"),
            "tokens/s": _number(row, "tokens_per_s"),
            "bubble": _percent(row, "bubble_fraction"),
            "ideal bubble": _percent(row, "ideal_bubble_fraction"),
            "peak memory": f"{sum(ranks) / 2**30:.2f} GiB" if ranks else "",
            "final loss": _number(row, "final_loss"),
            "loss difference": "reference" if self.references.get(row) is row else compared,
            "best val. loss": _number(row, "best_val_loss"),
        }
        if self.objective.name not in _SHOWN:
            results[self.objective.name] = self.show_score(row) if row in self.scores else ""
        return results


def read_table(folder: Path, objective_name: str | None = None, direction: str | None = None) -> Table:
    """Read what the jobs below ``folder`` have left.

    Args:
        folder: The sweep's directory.
        objective_name: ``sweep.objective``; None: see ``objective``.
        direction: ``sweep.direction``.
    """
    jobs = read_jobs(folder)
    keys = swept_keys([job for _, job in jobs])
    chosen = objective(objective_name, keys, [path for path, _ in jobs], direction)
    return Table(folder, keys, [_read_row(path, job, keys) for path, job in jobs], chosen)


def _read_row(folder: Path, job: Job, keys: list[str]) -> Row:
    summary = read_object(folder / SUMMARY) if job.status == FINISHED else {}
    steps = [record for record in read_records(folder / METRICS) if "step_time_s" in record]
    times = after_warmup([step["step_time_s"] for step in steps if step["step_time_s"] is not None])
    curve = [(step["step"], step["loss"]) for step in steps if step.get("loss") is not None]
    return Row(job, folder, label(job, keys), values(job), summary, list(times), curve)


def write_csv(table: Table, path: Path) -> None:
    """Write one line per job: its overrides, how it ended, and its summary with the spread of the step times."""
    records = [dict(_record(table, row)) for row in table.rows]
    first = ["job", *dict.fromkeys(key for row in table.rows for key in row.values), "status", "error", "seconds"]
    columns = dict.fromkeys([*first, *(key for record in records for key in record)])
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(records)


def _record(table: Table, row: Row) -> Iterator[tuple[str, Any]]:
    own = {"status": row.job.status, "error": row.problem, "seconds": row.job.seconds}
    yield from {"job": row.job.num, **row.values, **own}.items()
    for key, value in flat(row.summary).items():
        # An override of the same name has the same value.
        columns = _columns(key, value).items()
        yield from ((name, cell) for name, cell in columns if name not in {"job", *row.values, *own})
        if key == "step_time_s" and row.step_times is not None:
            yield "step_time_p10_s", float(row.step_times[0])
            yield "step_time_p90_s", float(row.step_times[2])
    if (difference := table.loss_difference(row)) is not None:
        yield "loss_difference", difference


def _columns(key: str, value: Any) -> dict[str, Any]:
    """A summary's field as columns: one number per rank becomes maximum and sum, any other list JSON."""
    if not isinstance(value, list):
        return {key: value}
    if value and all(isinstance(item, int | float) for item in value):
        return {f"{key}_max": max(value), f"{key}_sum": sum(value)}
    return {key: json.dumps(value)}


def seconds(value: float | None) -> str:
    """Format a duration in seconds with its unit; "" for None."""
    if value is None:
        return ""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return ""
    number, unit = seconds(low).split()
    return f"{number if seconds(high).endswith(f' {unit}') else seconds(low)}–{seconds(high)}"


def _number(row: Row, key: str) -> str:
    value = row.summary.get(key)
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def _percent(row: Row, key: str) -> str:
    return "" if row.summary.get(key) is None else f"{row.summary[key]:.1%}"
