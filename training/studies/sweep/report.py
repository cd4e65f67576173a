"""The report of a sweep: its table on the console, and sweep.csv, sweep.png and report.html in its directory."""

from __future__ import annotations

import datetime
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from common.errors import TrainingError
from conf.masking import mask_secrets
from conf.words import config_folder, key_of
from training.reporting.console import columns
from training.reporting.metrics import read_object
from training.reporting.monitor import Monitor
from training.reporting.page import render
from training.studies.sweep.table import ENOUGH_STEPS, TIME, Row, Table, read_table, write_csv

CSV, FIGURE, PAGE = "sweep.csv", "sweep.png", "report.html"


@contextmanager
def reported(config: DictConfig) -> Iterator[None]:
    """Write the report of a sweep when the block ends. Exit with code 1 if a job has failed."""
    set_direction(config)
    try:
        yield
    finally:
        done = _report(config)
    if not done:
        raise SystemExit(1)


def set_direction(config: DictConfig) -> None:
    """Set the direction of a sweeper that has one, such as optuna, to the direction of the objective.

    Raises:
        TrainingError: If another direction was typed, or the direction of the objective is unknown.
    """
    sweep, section = config.sweep, config.hydra.sweeper
    if "direction" not in section:
        return
    monitor = Monitor.of(config.train, sweep.objective, sweep.direction, ("sweep.objective", "sweep.direction"))
    for word in config.hydra.overrides.hydra:
        if key_of(word) == "hydra.sweeper.direction" and not re.fullmatch(rf".*=\[?{monitor.direction}\]?", word):
            raise TrainingError(
                f"{word}, but jobs are compared by {monitor.name}, and the best one is to {monitor.direction} it: "
                "leave the word out, or type another sweep.direction="
            )
    section.direction = monitor.direction


def _report(config: DictConfig) -> bool:
    """Write sweep.csv, sweep.png (if a job has trained) and report.html, and print the table.

    Returns whether the files are written and all jobs have finished. Queued jobs for which the sweep does not wait may
    be unfinished.
    """
    folder, direction = Path(config.hydra.sweep.dir), config.sweep.direction
    table = read_table(folder, config.sweep.objective, direction and direction.name)
    if not table.rows:
        return True
    print("\n".join(["", *results(table), describe(table)]))
    try:
        write_csv(table, folder / CSV)
        command = shlex.join(["python", Path(sys.argv[0]).name, *mask_secrets(sys.argv[1:])])
        (folder / PAGE).write_text(page(table, command), encoding="utf-8")
        if table.scored:
            from training.studies.sweep.figure import score_figure

            score_figure(table).savefig(folder / FIGURE)
        print(f"files: {folder}: {' '.join([CSV, *[FIGURE] * bool(table.scored), PAGE])}", flush=True)
    except OSError as error:
        print(f"error: the sweep's report cannot be written ({error})", file=sys.stderr)
        return False
    # With launcher.wait=false the jobs are still queued or running.
    expected = ("finished",) if config.launcher.get("wait", True) else ("finished", "waiting", "running")
    return all(row.job.status in expected for row in table.rows)


def describe(table: Table) -> str:
    """Format the table for the console, one line per job. The line of a failed job ends with the reason."""
    lines = [["job", *table.cells[table.rows[0]]]]
    for row, cells in table.cells.items():
        texts = [str(row.job.num), *cells.values()]
        lines.append(texts if row.finished else texts[: len(table.keys) + 2])
    return columns(lines)


def results(table: Table) -> Iterator[str]:
    """Yield a sentence about the best job of each model, the command to run that job again, and a note on losses."""
    for row in table.best:
        of_model = f" of {row.summary['model']}" if len(table.best) > 1 else ""
        rivals, equals = table.rivals(row), table.equals(row)
        worst = max(rivals, key=lambda rival: table.objective.sign * rival.score)
        alike = f", the fastest of {len(equals)} jobs that have it" if len(equals) > 1 else ""
        last = f"; the worst, {worst.label}, has {table.show_score(worst)}" if len(equals) < len(rivals) else ""
        doubt = _doubt(table, row) if table.objective.is_speed else ""
        kind = "Best median" if doubt else "Fastest" if table.objective.is_speed else "Best"
        yield (
            f"{kind}{of_model}: {row.label} with {table.objective.name} {table.show_score(row)}"
            f"{'' if table.objective.is_speed else alike}{last}.{doubt}"
        )
        yield f"The same again{of_model}: {_command_of(row)}"
    if table.references:
        yield "Loss difference: the largest at any step, relative to the training loss of the job marked as reference."


def _doubt(table: Table, row: Row) -> str:
    """Return why the row with the best speed may not be the fastest: too few steps, or overlapping spreads."""
    times = {other: other.times for other in table.rivals(row) if other.times is not None}
    steps = min(other.timed for other in [row, *times])
    if steps < ENOUGH_STEPS:
        return f" {steps} steps after the warm-up are too few to compare speeds; train for {ENOUGH_STEPS + 2} or more."
    close = [other.label for other in times if other is not row and times[other][0] <= times[row][2]]
    if not close:
        return ""
    listed = ", ".join([*close[:4], *[f"{len(close) - 4} more"] * (len(close) > 4)])
    return f" Its spread (10–90 %) overlaps that of {listed}: any of them may be the fastest."


def _command_of(row: Row) -> str:
    """Return the command that runs one job again, with the sweep's ``--config-dir``."""
    own = config_folder(sys.argv[1:])
    options = [] if own is None else [f"--config-dir={own}"]
    words = [word for word in row.job.overrides if word != "train.resume=auto"]
    return shlex.join(["python", "train.py", *options, *words])


def page(table: Table, command: str) -> str:
    """Return the HTML text of a page that opens offline: results, figures, jobs, errors, environment and command.

    Args:
        table: The table of the sweep, which must have a row.
        command: The command line that started the sweep, with secrets masked.
    """
    return render(
        Path(__file__).with_name("report.html.jinja"),
        next(filter(None, (read_object(row.folder / "environment.json") for row in table.rows)), None),
        table=table,
        command=command,
        time=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        results=list(results(table)),
        figures=list(_figures(table)) if table.scored else [],
    )


def _figures(table: Table) -> Iterator[tuple[str, str]]:
    """Yield the caption and the data URL of each figure. At least one job must have a score."""
    from training.reporting.plot import embedded
    from training.studies.sweep.figure import loss_figure, score_figure

    caption = f"{table.objective.title}: {'larger' if table.objective.sign < 0 else 'smaller'} is better"
    if table.objective.name == TIME:
        caption += (
            ". Medians after the warm-up, with whiskers from the 10th to the 90th percentile. Ideal, of pipelines: if "
            "splitting the batch cost nothing but the schedule's bubble"
        )
    yield caption, embedded(score_figure(table))
    if (losses := loss_figure(table)) is not None:
        yield "training loss over the steps", embedded(losses)
