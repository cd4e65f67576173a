"""The rows of a sweep: what each job was, how it ended, and how long its steps took."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from training.reporting.metrics import METRICS, SUMMARY, after_warmup, read_records
from training.sweep.record import FINISHED, Job, label, read_jobs, swept_keys, values

SPREAD = (10, 90)  # percentiles of the steps after the warm-up


@dataclass
class Row:
    """``times``: seconds of each step after the warm-up; ``curve``: (step, loss) of every step."""

    job: Job
    folder: Path
    label: str
    values: dict[str, str]
    summary: dict[str, Any] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    best: bool = False

    @property
    def finished(self) -> bool:
        return self.job.status == FINISHED

    @property
    def step_time(self) -> float | None:
        """Median seconds per step; None where the job has not finished or has not trained."""
        return float(np.median(self.times)) if self.finished and self.times else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The 10th and the 90th percentile of the seconds per step."""
        return tuple(float(q) for q in np.percentile(self.times, SPREAD)) if self.step_time is not None else None

    @property
    def batch(self) -> int | None:
        """Samples per step."""
        if self.step_time is None or not self.summary.get("samples_per_s"):
            return None
        return round(self.summary["samples_per_s"] * self.summary["step_time_s"])

    @property
    def problem(self) -> str:
        """In one line why there is no result; empty where there is one."""
        if self.finished:
            return ""
        lines = [line.strip() for line in (self.job.error or "").splitlines() if line.strip()]
        if not lines:
            return {"waiting": "not started", "running": "no end is recorded"}.get(self.job.status, "")
        return lines[-1].removeprefix("common.errors.") if _is_traceback(lines) else lines[0]


@dataclass
class Table:
    """``keys``: the overrides that differ from job to job, in their order."""

    folder: Path
    keys: list[str]
    rows: list[Row]

    @property
    def timed(self) -> list[Row]:
        """The rows that have a time per step."""
        return [row for row in self.rows if row.step_time is not None]

    @property
    def per_sample(self) -> bool:
        """Whether only the time per sample can be compared, as steps are of different sizes."""
        return len({row.batch for row in self.timed}) > 1

    @property
    def subject(self) -> str:
        """What was swept over, as far as a job has come to its end: "resnet50, pipelined, cpu"."""
        found = []
        for name in ("model", "parallel", "device"):
            found.append("/".join(dict.fromkeys(str(row.summary[name]) for row in self.rows if name in row.summary)))
        return ", ".join(filter(None, found))

    def cost(self, row: Row) -> float:
        """Seconds per step, or per sample where batches differ."""
        return row.step_time / row.batch if self.per_sample else row.step_time


def read_table(folder: Path) -> Table:
    """Everything that the jobs below ``folder`` have left, by job number; the fastest of each model is the best."""
    found = read_jobs(folder)
    keys = swept_keys([job for _, job in found])
    rows = [Row(job, path, label(job, keys), values(job)) for path, job in found]
    for row in rows:
        row.summary = _json(row.folder / SUMMARY) if row.finished else {}
        steps = [line for line in read_records(row.folder / METRICS) if "step_time_s" in line]
        row.times = list(after_warmup([line["step_time_s"] for line in steps if line["step_time_s"] is not None]))
        row.curve = [(line["step"], line["loss"]) for line in steps if line.get("loss") is not None]
    table = Table(folder, keys, rows)
    for model in {row.summary.get("model") for row in table.timed}:
        rivals = [row for row in table.timed if row.summary.get("model") == model]
        if len(rivals) > 1:
            min(rivals, key=table.cost).best = True
    return table


def write_csv(table: Table, path: Path) -> None:
    """One line per job: its overrides, how it ended, and its summary's numbers with the spread of the time per step."""
    records = [_record(row) for row in table.rows]
    first = ["job", *dict.fromkeys(key for row in table.rows for key in row.values), "status", "error", "seconds"]
    columns = dict.fromkeys([*first, *(key for record in records for key in record)])
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(records)


def _record(row: Row) -> dict[str, Any]:
    job = row.job
    record = {"job": job.num, **row.values, "status": job.status, "error": row.problem, "seconds": job.seconds}
    for key, value in row.summary.items():
        for name, content in _columns(key, value):
            record.setdefault(name, content)  # an override of the same name says the same
        if key == "step_time_s" and row.spread is not None:
            record["step_time_p10_s"], record["step_time_p90_s"] = row.spread
    return record


def _columns(key: str, value: Any) -> list[tuple[str, Any]]:
    """A summary's field as columns: numbers of ranks as their largest and their sum, anything deeper as JSON."""
    if isinstance(value, dict):
        return [pair for name, item in value.items() for pair in _columns(f"{key}.{name}", item)]
    if not isinstance(value, list):
        return [(key, value)]
    if value and all(isinstance(item, int | float) for item in value):
        return [(f"{key}_max", max(value)), (f"{key}_sum", sum(value))]
    return [(key, json.dumps(value))]


def _is_traceback(lines: list[str]) -> bool:
    return any(line.startswith("Traceback (most recent call last)") for line in lines)


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
