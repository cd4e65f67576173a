"""The report of a sweep: its table on the console, and files with tables, figures and a page in its directory."""

from __future__ import annotations

import datetime
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from common.errors import TrainingError
from conf.masking import mask_secrets
from conf.words import config_folder, key_of
from training.reporting.console import columns
from training.reporting.metrics import read_object
from training.reporting.monitor import Monitor
from training.reporting.page import PAGE, render
from training.studies.sweep.table import ENOUGH_STEPS, TIME, Row, Table, latex, read_table, write_csv


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
    """Write the table in its forms, the figures (if a job has trained) and report.html, and print the table.

    Returns whether the files are written and all jobs have finished. Queued jobs for which the sweep does not wait may
    be unfinished.
    """
    folder, direction = Path(config.hydra.sweep.dir), config.sweep.direction
    jobs = read_table(folder, config.sweep.objective, direction and direction.name, config.sweep.repeat)
    if not jobs.rows:
        return True
    table = jobs.settings(config.sweep.repeat)
    command = shlex.join(["python", Path(sys.argv[0]).name, *mask_secrets(sys.argv[1:])])
    print("\n".join(["", *results(table), describe(table)]))
    files: dict[str, Callable[[Path], object]] = {"sweep.csv": partial(write_csv, table)}
    if table.repeated:
        files["jobs.csv"] = partial(write_csv, jobs)
    if table.scored:
        files["sweep.tex"] = lambda path: path.write_text(latex(table))
        files |= {name: figure.savefig for name, _, figure in _figures(table)}
    files[PAGE] = lambda path: path.write_text(page(jobs, command, table), encoding="utf-8")
    try:
        for name, write in files.items():
            write(folder / name)
        print(f"files: {folder}: {' '.join(files)}", flush=True)
    except OSError as error:
        print(f"error: the sweep's report cannot be written ({error})", file=sys.stderr)
        return False
    # With launcher.wait=false the jobs are still queued or running.
    expected = ("finished",) if config.launcher.get("wait", True) else ("finished", "waiting", "running")
    return all(row.job.status in expected for row in jobs.rows)


def describe(table: Table) -> str:
    """Format the table for the console, one line per row. The line of a failed job ends with the reason."""
    lines = [["jobs" if table.repeated else "job", *table.cells[table.rows[0]]]]
    for row, cells in table.cells.items():
        texts = [" ".join(str(one.job.num) for one in row.repeats or [row]), *cells.values()]
        lines.append(texts if row.finished else texts[: len(table.keys) + 2])
    return columns(lines)


def results(table: Table) -> Iterator[str]:
    """Yield a sentence about the best row of each model, the command to run it again, and notes on numbers."""
    for row in table.best:
        of_model = f" of {row.summary['model']}" if len(table.best) > 1 else ""
        rivals, equals = table.rivals(row), table.equals(row)
        worst = max(rivals, key=lambda rival: table.objective.sign * rival.score)
        rows, speed = "settings" if table.repeated else "jobs", table.objective.is_speed
        alike = f", the fastest of {len(equals)} {rows} that have it" if len(equals) > 1 and not speed else ""
        last = f"; the worst, {worst.label}, has {table.show_score(worst)}" if len(equals) < len(rivals) else ""
        doubt = _doubt(table, row) if speed else ""
        kind = "Best median" if doubt else "Fastest" if speed else "Best"
        kind = "Mean" if len(rivals) == 1 else kind
        yield f"{kind}{of_model}: {row.label} with {table.objective.name} {table.show_score(row)}{alike}{last}.{doubt}"
        yield f"The same again{of_model}: {_command_of(row)}"
    if table.repeated:
        yield f"Numbers are means over {', '.join(table.repeated)} ± their sample standard deviation (n - 1)."
    if table.references or any(row.difference is not None for row in table.rows):
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
    """Return the command that runs one job, or all jobs of a setting, again, with the sweep's ``--config-dir``."""
    own = config_folder(sys.argv[1:])
    options = ["-m"] * (len(row.repeats) > 1) + ([] if own is None else [f"--config-dir={own}"])
    typed = ([word for word in job.job.overrides if word != "train.resume=auto"] for job in row.repeats or [row])
    several = [[*dict.fromkeys(words)] for words in zip(*typed, strict=False)]  # one word, or those of repetitions
    words = [",".join([word, *(other.partition("=")[2] for other in more)]) for word, *more in several]
    return shlex.join(["python", "train.py", *options, *words])


def page(jobs: Table, command: str, settings: Table | None = None) -> str:
    """Return the HTML text of a page that opens offline: results, figures, jobs, errors, environment and command.

    Args:
        jobs: The table of the jobs, which must have a row.
        command: The command line that started the sweep, with secrets masked.
        settings: The table of the settings, whose results are shown; None for that of the jobs.
    """
    from training.reporting.plot import embedded

    table = settings or jobs
    about = next(filter(None, (read_object(row.folder / "environment.json") for row in jobs.rows)), None)
    time = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    shown = {"jobs": jobs, "table": table, "command": command, "time": time, "results": list(results(table))}
    figures = [(caption, embedded(figure)) for _, caption, figure in _figures(table)]
    return render(Path(__file__).with_name("report.html.jinja"), about, figures=figures, **shown)


def _figures(table: Table) -> Iterator[tuple[str, str, Any]]:
    """Yield the file's name, the caption and the figure, if a job has a score."""
    if not table.scored:
        return
    from training.studies.sweep.figure import loss_figure, score_figure

    means = f". Means over {', '.join(table.repeated)} with a sample standard deviation (n - 1)" * bool(table.repeated)
    caption = f"{table.objective.title}: {'larger' if table.objective.sign < 0 else 'smaller'} is better{means}"
    if table.objective.name == TIME:
        spread = ", with whiskers from the 10th to the 90th percentile" * (not table.repeated)
        ideal = "Ideal, of pipelines: if splitting the batch cost nothing but the schedule's bubble"
        caption += f". Medians after the warm-up{spread}. {ideal}"
    yield "sweep.png", caption, score_figure(table)
    if (losses := loss_figure(table)) is not None:
        yield "curves.png", f"losses over the steps{means}", losses
