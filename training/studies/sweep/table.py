"""The rows of a sweep: each job's overrides, results and step times, and the comparison of jobs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import TrainingError
from conf.schema import REPEAT, Root
from parallel.strategies import names_where
from training.reporting import metrics
from training.reporting.job_record import Job, label, read_jobs, short, swept_keys, values
from training.reporting.metrics import METRICS, SUMMARY, after_warmup, flat, points_of, read_object, read_records
from training.reporting.monitor import LOSS, MINIMIZE, Monitor, direction_of

TIME, TRAINING_LOSS = "step_time_s", "final_loss"
_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}  # of LaTeX
ENOUGH_STEPS = 10  # after the warm-up; with fewer, the percentiles are the fastest and the slowest step

# Single keys, and sections that stand for all their keys.
_SPEED = (
    "parallel", "launcher", "device", "logger", "loggers", "hydra", "data.num_workers", "data.cache_dir",
    *(f"train.{key}" for key in ("compile", "activation_checkpointing", "precision", "deterministic", "tf32")),
    "train.cudnn_benchmark", "train.profile", "train.trace",
)  # fmt: skip
_SHOWN = (TIME, LOSS, TRAINING_LOSS, "samples_per_s", "tokens_per_s", "peak_memory_bytes", "bubble_fraction")


class Objective(Monitor):
    """The number by which jobs are compared: an entry of summary.json, or the best value of a validation metric."""

    @property
    def title(self) -> str:
        """The objective, as the label of an axis."""
        titles = {TIME: "time per step (s)", LOSS: "best validation loss", TRAINING_LOSS: "last training loss"}
        return titles.get(self.name, self.name)

    @property
    def is_speed(self) -> bool:
        """Whether the objective is the time per step, or is computed from it."""
        return self.name in (TIME, "samples_per_s", "tokens_per_s", "mfu")

    def of(self, summary: dict[str, Any], records: Sequence[dict[str, Any]]) -> float | None:
        """Return the objective of a run with this summary.json and metrics.jsonl; None if the run does not have it."""
        value = None
        if self.name.startswith("val_"):  # from this job only: the best value of a resumed run may be older
            found = (record[self.name] for record in records if record.get(self.name) is not None)
            value = min(found, key=lambda number: self.sign * number, default=None)
        if value is None:
            value = summary.get(f"best_{self.name}", summary.get(self.name))
        if isinstance(value, list):  # one number per rank
            value = sum(value)
        return float(value) if isinstance(value, int | float) else None


def choose_objective(
    name: str | None, direction: str | None, keys: Sequence[str], summaries: Sequence[dict[str, Any]]
) -> Objective:
    """Choose the number by which jobs are compared.

    Args:
        name: ``sweep.objective``. If None, the objective is the time per step if only settings of speed vary. Otherwise
            it is the jobs' ``train.monitor``, or the training loss if nothing was validated.
        direction: ``sweep.direction``. If None, the direction is the monitor's, or follows from the objective's name.
        keys: The overrides that vary, without those of repetitions.
        summaries: The contents of the jobs' summary.json.
    """
    monitors = {Monitor(one.get("monitor", LOSS), one.get("monitor_direction", MINIMIZE)) for one in summaries if one}
    monitor, known = monitors.pop() if len(monitors) == 1 else Monitor(LOSS, MINIMIZE)
    if name is None:
        # Jobs of different models are not compared.
        compared = [key for key in keys if key != "model"]
        validated = any(summary.get("best_val_loss") is not None for summary in summaries)
        name = TIME if compared and all(map(is_of_speed, compared)) else monitor if validated else TRAINING_LOSS
    return Objective(name, direction or (known if name == monitor else None) or direction_of(name) or MINIMIZE)


def is_repeated(key: str, repeat: Sequence[str]) -> bool:
    """Return whether jobs that differ only in ``key`` are repetitions, by ``sweep.repeat``."""
    return any(fnmatchcase(key, pattern) for pattern in repeat)


def is_of_speed(key: str) -> bool:
    """Return whether an override of ``key`` changes only the speed of training, not the trained model."""
    return any(key == name or key.startswith(f"{name}.") for name in _SPEED)


def value_for_sweeper(cfg: Root, folder: Path) -> float | None:
    """Return the objective of a finished job, for a sweeper that chooses the next jobs; None if it has not trained.

    Raises:
        TrainingError: If the run has no number named ``sweep.objective``.
    """
    summary = read_object(folder / SUMMARY)
    objective = choose_objective(cfg.sweep.objective, cfg.sweep.direction, (), [summary])
    value = objective.of(summary, read_records(folder / METRICS))
    if value is None and cfg.sweep.objective is not None and cfg.mode == "train":
        raise TrainingError(
            f"sweep.objective={objective.name} is not among the numbers in {folder} (summary.json, metrics.jsonl); was "
            "the run evaluated? train.eval_every=0 evaluates at the end"
        )
    return value


@dataclass(frozen=True, eq=False)
class Row:
    """A job, with the results in its directory; or a setting, with the means of the finished jobs that repeat it.

    Attributes:
        job: The job's record; of a setting, that of its first job.
        folder: The job's directory.
        label: The overrides that distinguish the job from the other jobs.
        values: All overrides of the job, by key; of a setting, without those of repetitions.
        summary: The contents of summary.json; empty unless the job has finished.
        points: By "loss" and "val_loss", the step and the loss of every step and of every evaluation.
        timed: The number of steps after the warm-up.
        times: The 10th, 50th and 90th percentile of the step times in seconds; None unless the job has finished and
            trained.
        score: The objective; NaN if the job has none.
        repeats: The jobs of a setting; empty for a job.
        deviations: Of a setting, the sample standard deviations (n - 1) of the summary's numbers.
        deviation: Of a setting, that of the score; NaN if only one of its jobs has a score.
        difference: Of a setting, the largest loss difference of its jobs; None if none has a reference.
    """

    job: Job
    folder: Path
    label: str
    values: dict[str, str]
    summary: dict[str, Any]
    points: metrics.Points
    timed: int
    times: np.ndarray | None
    score: float
    repeats: Sequence[Row] = ()
    deviations: Mapping[str, float] = field(default_factory=dict)
    deviation: float = math.nan
    difference: float | None = None

    @property
    def number(self) -> int:
        """The number n of a setting's jobs that have the objective."""
        return sum(not math.isnan(row.score) for row in self.repeats)

    @property
    def finished(self) -> bool:
        """Whether the job, or a job of the setting, has finished without an error."""
        return any(row.finished for row in self.repeats) if self.repeats else self.job.status == "finished"

    @property
    def problem(self) -> str:
        """The reason why there is no result, in one line; empty for a finished job."""
        if not self.job.error:
            return {"waiting": "not started", "running": "no end is recorded"}.get(self.job.status, "")
        # The line after the last frame of a traceback.
        raised = re.findall(r"^Traceback .*\n(?:[ \t].*\n)*(\S.*)", self.job.error, re.MULTILINE)
        return (raised or self.job.error.strip().splitlines())[-1 if raised else 0].removeprefix("common.errors.")

    @property
    def status(self) -> str:
        """The job's status, with the reason for a missing result and the number of skipped steps."""
        if self.repeats:
            failed = [f"; job {row.job.num} {row.status}" for row in self.repeats if not row.finished]
            return f"{len(self.repeats) - len(failed)} of {len(self.repeats)} finished{''.join(failed[:1])}"
        if skipped := self.summary.get("skipped_steps"):
            return f"{self.job.status}, {skipped} of {self.summary['steps']} steps skipped"
        return f"{self.job.status}: {self.problem}".removesuffix(": ")


@dataclass(frozen=True)
class Table:
    """All jobs of a sweep, or all of its settings.

    Attributes:
        folder: The sweep's directory.
        keys: The overrides that differ between rows, in their order.
        rows: One row per job, by number; or one per setting.
        objective: The number by which rows are compared.
        repeated: The overrides in which the jobs of a setting differ; empty for a table of jobs.
    """

    folder: Path
    keys: list[str]
    rows: list[Row]
    objective: Objective
    repeated: Sequence[str] = ()

    def settings(self, repeat: Sequence[str] = REPEAT) -> Table:
        """Return the table of settings by ``sweep.repeat``; without repetitions, this table."""
        repeated = [key for key in self.keys if is_repeated(key, repeat)]
        keys = [key for key in self.keys if key not in repeated]
        groups: dict[tuple, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(tuple(row.values.get(key) for key in keys), []).append(row)
        rows = [_setting(self, jobs, keys, repeated) for jobs in groups.values()]
        return Table(self.folder, keys, rows, self.objective, repeated) if repeated else self

    @cached_property
    def scored(self) -> list[Row]:
        """The rows that have the objective."""
        return [row for row in self.rows if not math.isnan(row.score)]

    @cached_property
    def best(self) -> list[Row]:
        """The best row of each model with several scored rows; the fastest best row if several are equally good."""
        sign = self.objective.sign
        groups = {row.summary["model"]: self.rivals(row) for row in self.scored}
        compared = [rivals for rivals in groups.values() if len(rivals) > 1 or self.repeated]
        best = [min(rivals, key=lambda row: sign * row.score) for rivals in compared]
        return [min(self.equals(row), key=lambda equal: equal.summary.get(TIME) or math.inf) for row in best]

    def equals(self, row: Row) -> list[Row]:
        """Return the rivals of ``row``, including itself, that have the same score in all digits that are shown."""
        return [other for other in self.rivals(row) if f"{other.score:.4g}" == f"{row.score:.4g}"]

    def rivals(self, row: Row) -> list[Row]:
        """Return the scored rows of the same model as ``row``, including ``row``."""
        return [other for other in self.scored if other.summary["model"] == row.summary["model"]]

    @cached_property
    def references(self) -> dict[Row, Row]:
        """The job with which each job's losses are compared: ``single`` among equal trainings, otherwise the first."""
        alone = names_where(stages=False, replicas=False, gpu_only=False, degree="")
        groups: dict[tuple, list[Row]] = {}
        for row in self.rows:
            if row.finished and "loss" in row.points:
                learned = tuple(row.values.get(key) for key in self.keys if not is_of_speed(key))
                groups.setdefault(learned, []).append(row)
        several = [rows for rows in groups.values() if len(rows) > 1]
        first = [next((row for row in rows if row.summary["parallel"] in alone), rows[0]) for rows in several]
        return {row: one for one, rows in zip(first, several, strict=True) for row in rows}

    def loss_difference(self, row: Row) -> float | None:
        """Return the maximum of |loss - reference's| / |reference's| over the steps; infinite if the steps differ.

        Of a setting, the largest of its jobs. None for the reference itself, and for a job without a reference.
        """
        reference = self.references.get(row, row)
        if reference is row:
            return row.difference
        (steps, losses), (same, expected) = (np.array(one.points["loss"]).T for one in (row, reference))
        if not np.array_equal(steps, same):
            return float("inf")
        return float((np.abs(losses - expected) / np.maximum(np.abs(expected), np.finfo(float).tiny)).max())

    def show_score(self, row: Row) -> str:
        """Format the score of a row, of a setting with its standard deviation. The row must have a score."""
        return plus_minus(row.score, row.deviation, seconds if self.objective.name == TIME else None)

    @cached_property
    def cells(self) -> dict[Row, dict[str, str]]:
        """The overrides and results of each row as text, by column. Empty columns are left out."""
        own = {row: {key: short(row.values.get(key, "")) for key in self.keys} for row in self.rows}
        cells = {row: texts | {"status": row.status} | self._results(row) for row, texts in own.items()}
        filled = [name for name in cells[self.rows[0]] if name in self.keys or any(c[name] for c in cells.values())]
        return {row: {name: texts[name] for name in filled} for row, texts in cells.items()}

    def _results(self, row: Row) -> dict[str, str]:
        low, median, high = ("", "", "") if row.times is None else map(seconds, row.times)
        difference, ranks = self.loss_difference(row), row.summary.get("peak_memory_bytes")
        compared = {None: "", float("inf"): "other steps"}.get(difference, f"{difference or 0:.1g}")
        results = {
            "time per step": plus_minus(row.summary[TIME], row.deviations.get(TIME), seconds) if median else "",
            "10–90 %": f"{low} – {high}" if low else "",
            "samples/s": _shown(row, "samples_per_s"),
            "tokens/s": _shown(row, "tokens_per_s"),
            "bubble": _shown(row, "bubble_fraction", ".1%"),
            "ideal bubble": _shown(row, "ideal_bubble_fraction", ".1%"),
            "peak memory": f"{sum(ranks) / 2**30:.2f} GiB" if ranks else "",
            "final loss": _shown(row, TRAINING_LOSS),
            "loss difference": "reference" if self.references.get(row) is row else compared,
            "best val. loss": _shown(row, "best_val_loss"),
        }
        if self.objective.name not in _SHOWN:
            results[self.objective.name] = "" if math.isnan(row.score) else self.show_score(row)
        return results


def read_table(
    folder: Path, objective_name: str | None = None, direction: str | None = None, repeat: Sequence[str] = REPEAT
) -> Table:
    """Read the results of the jobs below ``folder``. For the other arguments, see ``choose_objective``."""
    jobs = read_jobs(folder)
    keys = swept_keys([job for _, job in jobs])
    summaries = [read_object(path / SUMMARY) if job.status == "finished" else {} for path, job in jobs]
    compared = [key for key in keys if not is_repeated(key, repeat)]
    objective = choose_objective(objective_name, direction, compared, summaries)
    rows = []
    for (path, job), summary in zip(jobs, summaries, strict=True):
        records = read_records(path / METRICS)
        timed = after_warmup([record["step_time_s"] for record in records if record.get("step_time_s") is not None])
        points = points_of(records, ("loss", LOSS))
        times = np.percentile(timed, (10, 50, 90)) if summary and timed else None
        score = objective.of(summary, records) if summary else None
        score = math.nan if score is None else score
        rows.append(Row(job, path, label(job, keys), values(job), summary, points, len(timed), times, score))
    return Table(folder, keys, rows, objective)


def _setting(table: Table, jobs: Sequence[Row], keys: list[str], repeated: Sequence[str]) -> Row:
    done = [row for row in jobs if row.finished]
    summary, deviations = average([row.summary for row in done])
    score, deviation = average([{"": row.score} for row in done if not math.isnan(row.score)])
    times = [row.times for row in done if row.times is not None]
    differences = [found for job in jobs if (found := table.loss_difference(job)) is not None]
    first, named = jobs[0], label(jobs[0].job, keys) if keys else "all repetitions"
    return Row(
        first.job, first.folder, named, {key: first.values[key] for key in first.values if key not in repeated},
        summary, {}, min((row.timed for row in done), default=0), np.mean(times, axis=0) if times else None,
        score.get("", math.nan), jobs, deviations, deviation.get("", math.nan), max(differences, default=None),
    )  # fmt: skip


def average(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the means of the numbers that all records have, and their sample standard deviations (n - 1).

    Lists of numbers have means only. Other values are kept if all records have the same, and otherwise are None.
    """
    means: dict[str, Any] = {}
    deviations: dict[str, float] = {}
    for key in dict.fromkeys(key for record in records for key in record):
        values: list[Any] = [record.get(key) for record in records]
        if all(value == values[0] for value in values):  # of which numpy's mean may differ in the last bit
            means[key], deviation = values[0], 0.0
        else:
            try:
                means[key], deviation = np.mean(values, axis=0).tolist(), np.std(values, axis=0, ddof=1)
            except (TypeError, ValueError):  # not numbers, or lists of different lengths
                means[key] = None
        if isinstance(means[key], int | float) and len(values) > 1:
            deviations[key] = float(deviation)
    return means, deviations


def write_csv(table: Table, path: Path) -> None:
    """Write one line per row: its overrides, its status, and its summary with the spread of the step times.

    That of a setting has the number n of jobs with the objective, and means. NAME_std is a standard deviation.
    """
    name = table.objective.name
    first, last = ("n", (name, f"{name}_std")) if table.repeated else ("job", ("error", "seconds"))
    own = (first, *dict.fromkeys(key for row in table.rows for key in row.values), "status", *last)
    metrics.write_table(path, [dict.fromkeys(own) | dict(_record(table, row)) for row in table.rows])


def _record(table: Table, row: Row) -> Iterator[tuple[str, Any]]:
    yield from ((f"{key}_std", deviation) for key, deviation in row.deviations.items() if deviation)
    if not math.isnan(row.deviation):
        yield f"{table.objective.name}_std", row.deviation
    for key, value in flat(row.summary).items():
        if not isinstance(value, list):
            yield key, value
        elif value and all(isinstance(item, int | float) for item in value):  # one number per rank
            yield from ((f"{key}_max", max(value)), (f"{key}_sum", sum(value)))
        else:
            yield key, json.dumps(value)
    if row.times is not None:
        yield from (("step_time_p10_s", row.times[0]), ("step_time_p90_s", row.times[2]))
    if (difference := table.loss_difference(row)) is not None:
        yield "loss_difference", difference
    # Added last, because an override may have the same name as a number of the summary.
    yield table.objective.name, None if math.isnan(row.score) else row.score
    if row.repeats:
        yield from {"n": row.number, **row.values, "status": row.status}.items()
        return
    yield from {"job": row.job.num, **row.values, "status": row.job.status, "error": row.problem}.items()
    yield "seconds", row.job.seconds


def latex(table: Table) -> str:
    """Return sweep.tex, the settings with their objective, in bold the best one, and the results of the test.

    It needs the package booktabs. Numbers are means with sample standard deviations (n - 1) where a setting has several
    jobs.
    """
    name, summaries = table.objective.name, [row.summary for row in table.scored]
    tested = sorted({key for one in summaries for key in one if key[:5] == "test_" and isinstance(one[key], float)})
    head = [*table.keys, *["n"] * bool(table.repeated), name, *(key for key in tested if key != name)]
    lines = [[escape(text) for text in head]]
    for row in table.rows:
        numbers = [(row.score, row.deviation, row in table.best)]
        numbers += [(row.summary.get(key), row.deviations.get(key), False) for key in tested if key != name]
        own = [escape(short(row.values.get(key, ""))) for key in table.keys]
        lines.append([*own, *[f"{row.number}"] * bool(table.repeated), *(_latex_number(*one) for one in numbers)])
    first, *rest = (f"{' & '.join(line)} \\\\" for line in lines)
    begin = rf"\begin{{tabular}}{{{'l' * len(table.keys)}{'c' * (len(head) - len(table.keys))}}}"
    return "\n".join([begin, r"\toprule", first, r"\midrule", *rest, r"\bottomrule", r"\end{tabular}", ""])


def escape(text: str) -> str:
    """Return a text as LaTeX prints it unchanged."""
    return re.sub(r"[\\~^&%$#_{}]", lambda found: _SPECIAL.get(found[0], rf"\{found[0]}"), text)


def _latex_number(mean: Any, deviation: float | None, is_best: bool) -> str:
    if not isinstance(mean, float) or math.isnan(mean):
        return "--"
    shown = re.sub(r"e([+-]\d+)", r" \\cdot 10^{\1}", plus_minus(mean, deviation, sign=r"\pm"))
    return rf"$\mathbf{{{shown}}}$" if is_best else f"${shown}$"


def seconds(value: float) -> str:
    """Format a duration in seconds with its unit."""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def plus_minus(mean: Any, deviation: float | None, form: Callable[..., str] | None = None, sign: str = "±") -> str:
    """Format a mean and its standard deviation with two digits, or both with ``form``; without one, the mean alone."""
    show = form or "{:.4g}".format
    if deviation is None or math.isnan(deviation):
        return show(mean)
    if form or not 1e-6 < deviation < math.inf:
        return f"{show(mean)} {sign} {show(deviation)}"
    digits = max(0, 1 - math.floor(math.log10(deviation)))
    return f"{mean:.{digits}f} {sign} {deviation:.{digits}f}"


def _shown(row: Row, key: str, form: str = "") -> str:
    value, deviation = row.summary.get(key), row.deviations.get(key)
    if value is None:
        return ""
    own = format(value, form or (",.0f" if abs(value) >= 100 else ".4g"))
    return own if form or deviation is None else plus_minus(value, deviation)
