"""The end of a sweep: its table on the console, and sweep.csv, sweep.png and report.html in its directory."""

from __future__ import annotations

import base64
import datetime
import io
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from conf.composition import as_typed, config_folder
from conf.masking import mask_secrets
from training.reporting.job_record import FINISHED, RUNNING, WAITING
from training.reporting.metrics import read_object

if TYPE_CHECKING:  # numpy: Hydra imports this module before every run
    from training.sweep.table import Row, Table

CSV, FIGURE, PAGE = "sweep.csv", "sweep.png", "report.html"
_NAMED = 4  # jobs in a sentence


class SweepReport(Callback):
    """Hydra's callback that reports a sweep when it has ended; the exit code is 1 if a job failed."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the report into the sweep's directory."""
        # With launcher.wait=false the jobs are still queued or running.
        waited = OmegaConf.select(config, "launcher.wait", default=True)
        chosen = OmegaConf.select(config, "sweep.objective"), OmegaConf.select(config, "sweep.direction")
        if not report(Path(config.hydra.sweep.dir), waited, *chosen):
            raise SystemExit(1)


def report(folder: Path, ended: bool = True, objective: str | None = None, direction: str | None = None) -> bool:
    """Write sweep.csv, sweep.png (if a job has trained) and report.html, and print the table.

    Args:
        folder: The sweep's directory.
        ended: Whether every job should have ended by now.
        objective: ``sweep.objective``.
        direction: ``sweep.direction``.

    Returns:
        Whether the files are written and no job has failed, been interrupted or, if ``ended``, is unfinished.
    """
    from training.sweep.table import read_table, write_csv

    table = read_table(folder, objective, direction)
    if not table.rows:
        return True
    print("\n".join(["", *results(table), describe(table)]))
    try:
        write_csv(table, folder / CSV)
        command = shlex.join(["python", Path(sys.argv[0]).name, *mask_secrets(as_typed(sys.argv[1:]))])
        (folder / PAGE).write_text(page(table, command), encoding="utf-8")
        if table.scores:
            from training.sweep.figure import score_figure

            score_figure(table).savefig(folder / FIGURE)
        print(f"files: {folder}: {' '.join([CSV, *[FIGURE] * bool(table.scores), PAGE])}", flush=True)
    except OSError as error:
        print(f"error: the sweep's report cannot be written ({error})", file=sys.stderr)
        return False
    expected = (FINISHED,) if ended else (FINISHED, WAITING, RUNNING)
    return all(row.job.status in expected for row in table.rows)


def describe(table: Table) -> str:
    """Format the table for a console, one line per job; the reason why a job has no result ends its line."""
    lines = [["job", *next(iter(table.cells.values()))]]
    for row, cells in table.cells.items():
        texts = [str(row.job.num), *cells.values()]
        lines.append(texts if row.finished else texts[: len(table.keys) + 2])
    whole = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(map(len, cells)) for cells in zip(*whole, strict=True)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=False)).rstrip() for line in lines)


def results(table: Table) -> Iterator[str]:
    """The best job of each model in a sentence, and how far apart the losses are of jobs that train the same."""
    sign = -1 if table.objective.larger_is_better else 1
    for row in table.best:
        whose = f" of {row.model}" if len(table.best) > 1 else ""
        worst = max(table.rivals(row), key=lambda rival: sign * table.scores[rival])
        yield (_by_speed if table.by_speed else _by_score)(table, row, worst, whose)
        yield f"The same again{whose}: {_command_of(row)}"
    yield from _loss_differences(table)


def _by_score(table: Table, row: Row, worst: Row, whose: str) -> str:
    score = f"{table.objective.name} {table.show_score(row)}"
    return f"Best{whose}: {row.label} with {score}; the worst, {worst.label}, has {table.show_score(worst)}."


def _by_speed(table: Table, row: Row, worst: Row, whose: str) -> str:
    """Say that ``row`` is the fastest only if there are enough steps and every other spread lies above its own."""
    from training.sweep.table import ENOUGH_STEPS

    steps, overlapping = min(len(rival.times) for rival in table.rivals(row)), table.overlapping(row)
    doubt = ""
    if steps < ENOUGH_STEPS:
        doubt = f" {steps} steps after the warm-up are too few to compare speeds; train for {ENOUGH_STEPS + 2} or more."
    elif overlapping:
        names = [other.label for other in overlapping[:_NAMED]]
        names += [f"{len(overlapping) - _NAMED} more"] * (len(overlapping) > _NAMED)
        listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
        doubt = f" Its spread (10–90 %) overlaps that of {listed}, so any of them may be the fastest."
    unit = f"per {'sample' if table.per_sample else 'step'}" if table.by_time else table.objective.name
    sentence = f"{'Best median' if doubt else 'Fastest'}{whose}: {row.label} with {table.show_score(row)} {unit}"
    if len(row.times) >= ENOUGH_STEPS <= len(worst.times) and worst not in overlapping:
        sentence += f", {table.costs(worst)[1] / table.costs(row)[1]:.2f}x as fast as {worst.label}"
    return f"{sentence}.{doubt}"


def _command_of(row: Row) -> str:
    """The command that runs a job again by itself, with the options of one's own that the sweep has."""
    own = config_folder(sys.argv[1:])
    options = [] if own is None else [f"--config-dir={own}"]
    words = [word for word in as_typed(row.job.overrides) if word != "train.resume=auto"]
    return shlex.join(["python", "train.py", *options, *words])


def _loss_differences(table: Table) -> Iterator[str]:
    """What the column of loss differences holds, and its largest."""
    compared = {row: difference for row in table.rows if (difference := table.loss_difference(row)) is not None}
    if not compared:
        return
    references = {table.references[row].label for row in compared}
    name = references.pop() if len(references) == 1 else "the reference that trains the same"
    largest = max(compared, key=compared.get)
    end = {0: "; 0 for all jobs", float("inf"): ""}.get(compared[largest])
    end = f"; {compared[largest]:.1g} at most ({largest.label})" if end is None else end
    yield f"Loss difference: relative to the training loss of {name}, the largest of all steps{end}."


def page(table: Table, command: str) -> str:
    """Return the HTML text of a page that opens offline: results, figures, jobs, errors, environment and command.

    Args:
        table: The sweep; it must have a row.
        command: The command line that started the sweep, secrets masked.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    folder = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters["breakable"] = lambda key: Markup(".<wbr>").join(key.split("."))
    return jinja.get_template("report.html.jinja").render(
        table=table,
        command=command,
        time=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        results=list(results(table)),
        figures=list(_figures(table)) if table.scores else [],
        errors=_errors(table),
        environment=_environment(table),
    )


def _figures(table: Table) -> Iterator[tuple[str, str, str]]:
    """Each figure's alternative text, its caption and its picture as an address."""
    from training.sweep.figure import loss_figure, score_figure

    caption = f"{'Larger' if table.objective.larger_is_better else 'Smaller'} is better."
    if table.by_time:
        caption = (
            "Median of each job's steps after the warm-up; the whiskers reach from the 10th to the 90th percentile. "
            + ("Steps are of different sizes, so the time per sample is shown. " if table.per_sample else "")
            + "Ideal, for a pipeline: its time with no more than its schedule's bubble, if splitting the batch cost "
            "nothing."
        )
    yield f"{table.objective.title} of each job".capitalize(), caption, _svg(score_figure(table))
    if (losses := loss_figure(table)) is not None:
        yield "Training loss of each job", "Training loss over the steps.", _svg(losses)


def _svg(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True)
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _errors(table: Table) -> dict[str, list[str]]:
    """The labels of the jobs by their error, for errors of which the table shows only a line."""
    errors: dict[str, list[str]] = {}
    for row in table.rows:
        error = (row.job.error or "").strip()
        if error and error != row.problem:
            errors.setdefault(error, []).append(row.label)
    return errors


def _environment(table: Table) -> list[str]:
    """The code and the machine of the first job that has recorded them; empty if none has."""
    records = (read_object(row.folder / "environment.json") for row in table.rows)
    record = next(filter(None, records), None)
    if record is None:
        return []
    commit, memory = record["git_commit"], record["memory_bytes"]
    return list(filter(None, [
        commit and f"commit {commit[:12]}" + " with changes" * bool(record["git_dirty"]),
        f"{record['cpu']['model']}, {record['cpu']['cores']} cores",
        memory and f"{memory / 2**30:.0f} GiB",
        *(f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in record["gpus"]),
        f"{record['platform']}, Python {record['python']}",
        *(f"{name} {version}" for name, version in record["packages"].items() if version),
    ]))  # fmt: skip
