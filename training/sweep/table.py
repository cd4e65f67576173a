"""The rows of a sweep: what each job was, how it ended, and how long its steps took."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parallel.strategies import names_where
from training.reporting.job_record import FINISHED, Job, label, read_jobs, short, swept_keys, values
from training.reporting.metrics import METRICS, SUMMARY, after_warmup, read_object, read_records
from training.reporting.objective import TIME, Objective, is_of_speed, objective

PERCENTILES = (10, 90)  # the spread of the step times
LOSS_DIFFERENCE = "loss difference"  # the title of a column
ENOUGH_STEPS = 10  # after the warm-up: of fewer, the percentiles are the fastest and the slowest step


@dataclass
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
        divisor: What step times are divided by to be comparable between jobs: 1, or the samples per step.
        score: The sweep's objective; None if the job has not finished or has no such number.
        best: Whether it has the best score of several jobs of its model.
        reference: The job whose training loss this one is compared with; None without another that trains the same.
    """

    job: Job
    folder: Path
    label: str
    values: dict[str, str]
    summary: dict[str, Any] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    divisor: int = 1
    score: float | None = None
    best: bool = False
    reference: Row | None = field(default=None, repr=False, compare=False)

    @property
    def finished(self) -> bool:
        """Whether the job has finished without an error."""
        return self.job.status == FINISHED

    def value(self, key: str) -> str:
        """An override's value for the eye; "" where the job has none."""
        return short(self.values.get(key, ""))

    @property
    def step_time(self) -> float | None:
        """Median seconds per step; None if the job has not finished or has not trained."""
        return float(np.median(self.times)) if self.finished and self.times else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The 10th and the 90th percentile of the seconds per step; None without a step time."""
        return tuple(np.percentile(self.times, PERCENTILES).tolist()) if self.step_time is not None else None

    @property
    def cost(self) -> float:
        """Median seconds per step, or per sample where the jobs' batches differ."""
        return self.step_time / self.divisor

    @property
    def spread_of_cost(self) -> tuple[float, float]:
        """The spread, per sample where the jobs' batches differ."""
        return self.spread[0] / self.divisor, self.spread[1] / self.divisor

    @property
    def loss_difference(self) -> float | None:
        """The largest of |loss - reference's| / |reference's| over the steps; infinite where those are others.

        None without a reference, or for the reference itself.
        """
        if self.reference is None or self.reference is self:
            return None
        (steps, losses), (others, expected) = (np.array(row.curve).T for row in (self, self.reference))
        if not np.array_equal(steps, others):
            return float("inf")
        return float((np.abs(losses - expected) / np.maximum(np.abs(expected), np.finfo(float).tiny)).max())

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


@dataclass
class Table:
    """All jobs of a sweep.

    Attributes:
        folder: The sweep's directory.
        keys: The overrides whose values differ between jobs, in their order.
        rows: One row per job, by number.
        objective: What jobs are compared by.
        per_sample: Whether ``Row.cost`` is a time per sample, as the jobs' steps are of different sizes.
    """

    folder: Path
    keys: list[str]
    rows: list[Row]
    objective: Objective
    per_sample: bool = False

    @property
    def by_time(self) -> bool:
        """Whether the objective is the time per step, or per sample."""
        return self.objective.name == TIME

    @property
    def by_speed(self) -> bool:
        """Whether the objective is the time per step or follows from it."""
        return self.objective.name in (TIME, "samples_per_s", "tokens_per_s")

    @property
    def scored(self) -> list[Row]:
        """The rows that have a score."""
        return [row for row in self.rows if row.score is not None]

    @property
    def timed(self) -> list[Row]:
        """The rows that have a step time."""
        return [row for row in self.rows if row.step_time is not None]

    @property
    def subject(self) -> str:
        """The models, strategies and devices of the finished jobs: "resnet50, pipelined, cpu"."""
        names = [
            "/".join(dict.fromkeys(str(row.summary[key]) for row in self.rows if key in row.summary))
            for key in ("model", "parallel", "device")
        ]
        return ", ".join(filter(None, names))

    @property
    def columns(self) -> dict[str, Callable[[Row], str]]:
        """The columns of results that at least one row fills: title, and what formats a row's cell."""
        shown = {title: show for title, show in _COLUMNS.items() if any(show(row) for row in self.rows)}
        if self.objective.name not in _SHOWN and self.scored:
            shown[self.objective.name] = self.show_score
        return shown

    def show_score(self, row: Row) -> str:
        """Formats the score of a row; "" where it has none."""
        if row.score is None:
            return ""
        return seconds(row.score) if self.by_time else f"{row.score:.4g}"

    def overlapping(self, row: Row) -> list[Row]:
        """The rivals of ``row``, the fastest, whose spread and its own overlap: they may be as fast."""
        high = row.spread_of_cost[1]
        return [other for other in self.rivals(row) if other is not row and other.spread_of_cost[0] <= high]

    def rivals(self, row: Row) -> list[Row]:
        """The scored rows of the same model as ``row``, itself included."""
        return [other for other in self.scored if other.summary.get("model") == row.summary.get("model")]


def read_table(folder: Path, objective_name: str | None = None, direction: str | None = None) -> Table:
    """Reads what the jobs below ``folder`` have left; marks the best job of each model.

    Args:
        folder: The sweep's directory.
        objective_name: ``sweep.objective``; None: see ``training.reporting.objective``.
        direction: ``sweep.direction``.
    """
    jobs = read_jobs(folder)
    keys = swept_keys([job for _, job in jobs])
    chosen = objective(objective_name, keys, [path for path, _ in jobs], direction)
    table = Table(folder, keys, [Row(job, path, label(job, keys), values(job)) for path, job in jobs], chosen)
    for row in table.rows:
        row.summary = read_object(row.folder / SUMMARY) if row.finished else {}
        steps = [record for record in read_records(row.folder / METRICS) if "step_time_s" in record]
        row.times = list(after_warmup([step["step_time_s"] for step in steps if step["step_time_s"] is not None]))
        row.curve = [(step["step"], step["loss"]) for step in steps if step.get("loss") is not None]
    batches = [round((row.summary.get("samples_per_s") or 0) * row.summary["step_time_s"]) for row in table.timed]
    table.per_sample = len(set(batches)) > 1 and 0 not in batches
    for row, batch in zip(table.timed, batches, strict=True):
        row.divisor = batch if table.per_sample else 1
    for row in table.timed if table.by_time else table.rows:
        if row.finished:
            row.score = row.cost if table.by_time else chosen.of(row.folder)
    _set_references(table)
    for row in table.scored:
        rivals = table.rivals(row)
        row.best = len(rivals) > 1 and row is next(r for r in rivals if r.score == chosen.best(r.score for r in rivals))
    return table


def _set_references(table: Table) -> None:
    """Gives jobs that train the same, as they differ in settings of speed only, one to be compared with: ``single``."""
    alone = names_where(stages=False, replicas=False, gpu_only=False)
    groups: dict[tuple, list[Row]] = {}
    for row in table.rows:
        if row.finished and row.curve:
            learned = tuple(row.values.get(key) for key in table.keys if not is_of_speed(key))
            groups.setdefault(learned, []).append(row)
    for rows in groups.values():
        reference = next((row for row in rows if row.summary.get("parallel") in alone), rows[0])
        for row in rows if len(rows) > 1 else ():
            row.reference = reference


def write_csv(table: Table, path: Path) -> None:
    """Writes one line per job: its overrides, how it ended, and its summary with the spread of the step times."""
    records = [_record(row) for row in table.rows]
    first = ["job", *dict.fromkeys(key for row in table.rows for key in row.values), "status", "error", "seconds"]
    columns = dict.fromkeys([*first, *(key for record in records for key in record)])
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(records)


def _record(row: Row) -> dict[str, Any]:
    record = {"job": row.job.num, **row.values}
    record |= {"status": row.job.status, "error": row.problem, "seconds": row.job.seconds}
    for key, value in row.summary.items():
        for name, cell in _flatten(key, value):
            record.setdefault(name, cell)  # an override of the same name has the same value
        if key == "step_time_s" and row.spread is not None:
            record["step_time_p10_s"], record["step_time_p90_s"] = row.spread
    if row.loss_difference is not None:
        record["loss_difference"] = row.loss_difference
    return record


def _flatten(key: str, value: Any) -> list[tuple[str, Any]]:
    """A summary's field as columns: one number per rank becomes maximum and sum, anything deeper JSON."""
    if isinstance(value, dict):
        return [pair for name, item in value.items() for pair in _flatten(f"{key}.{name}", item)]
    if not isinstance(value, list):
        return [(key, value)]
    if value and all(isinstance(item, int | float) for item in value):
        return [(f"{key}_max", max(value)), (f"{key}_sum", sum(value))]
    return [(key, json.dumps(value))]


def seconds(value: float | None) -> str:
    """Formats a duration in seconds with its unit; "" for None."""
    if value is None:
        return ""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def _range(ends: tuple[float, float] | None) -> str:
    if ends is None:
        return ""
    low, high = (seconds(value) for value in ends)
    number, unit = low.split()
    return f"{number if high.endswith(f' {unit}') else low}–{high}"


def _number(key: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row.summary.get(key)
        return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"

    return show


def _percent(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.summary.get(key) is None else f"{row.summary[key]:.1%}"


def _memory(row: Row) -> str:
    """The sum over the ranks."""
    ranks = row.summary.get("peak_memory_bytes")
    return f"{sum(ranks) / 2**30:.2f} GiB" if ranks else ""


def _loss_difference(row: Row) -> str:
    difference = row.loss_difference
    if difference is None:
        return "reference" if row.reference is row else ""
    return "other steps" if difference == float("inf") else f"{difference:.1g}"


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "time per step": lambda row: seconds(row.step_time),
    "10–90 %": lambda row: _range(row.spread),
    "samples/s": _number("samples_per_s"),
    "tokens/s": _number("tokens_per_s"),
    "bubble": _percent("bubble_fraction"),
    "ideal bubble": _percent("ideal_bubble_fraction"),
    "peak memory": _memory,
    "final loss": _number("final_loss"),
    LOSS_DIFFERENCE: _loss_difference,
    "best val. loss": _number("best_val_loss"),
}
_SHOWN = (TIME, "val_loss", "final_loss", "samples_per_s", "tokens_per_s", "peak_memory_bytes", "bubble_fraction")
