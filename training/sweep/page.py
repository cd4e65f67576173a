"""report.html: one page without scripts and without external resources."""

from __future__ import annotations

import base64
import datetime
import io
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from conf.trust import config_folder
from conf.words import as_typed
from training.reporting.metrics import read_object
from training.reporting.objective import is_of_speed
from training.sweep.table import ENOUGH_STEPS, Row, Table

_NAMED = 4  # jobs in a sentence


def page(table: Table, command: str) -> str:
    """Renders the report of a sweep.

    Args:
        table: The sweep; it must have a row.
        command: The command line that started the sweep, secrets masked.

    Returns:
        The HTML text: results, figures, jobs, errors, timelines, environment and command.
    """
    folder = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters["breakable"] = lambda key: Markup(".<wbr>").join(key.split("."))
    return jinja.get_template("report.html.jinja").render(
        table=table,
        command=command,
        time=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        results=list(results(table)),
        figures=list(_figures(table)) if table.scored else [],
        errors=_errors(table),
        timelines=[
            (row, _data_uri("image/png", path.read_bytes()))
            for row in table.rows
            if (path := row.folder / "timeline.png").exists()
        ],
        environment=_environment(table),
    )


def results(table: Table) -> Iterator[str]:
    """The best job of each model in a sentence, and how far apart the losses are of jobs that train the same."""
    best = [row for row in table.rows if row.best]
    for row in best:
        rivals, sign = table.rivals(row), -1 if table.objective.larger_is_better else 1
        worst = max(rivals, key=lambda rival: sign * rival.score)
        whose = f" of {row.summary['model']}" if len(best) > 1 else ""
        doubt = _doubt(table, row) if table.by_speed else ""
        score = table.show_score(row)
        if not table.by_speed:
            score = f"{table.objective.name} {score}"
            yield f"Best{whose}: {row.label} with {score}; the worst, {worst.label}, has {table.show_score(worst)}."
            yield f"The same again{whose}: {_command_of(row)}"
            continue
        unit = f"per {'sample' if table.per_sample else 'step'}" if table.by_time else table.objective.name
        sentence = f"{'Best median' if doubt else 'Fastest'}{whose}: {row.label} with {score} {unit}"
        if len(row.times) >= ENOUGH_STEPS <= len(worst.times) and worst not in table.overlapping(row):
            sentence += f", {worst.cost / row.cost:.2f}x as fast as {worst.label}"
        yield f"{sentence}.{doubt}"
        yield f"The same again{whose}: {_command_of(row)}"
    yield from _loss_differences(table)


def _command_of(row: Row) -> str:
    """The command that runs a job again by itself, with the options of one's own that the sweep has."""
    own = config_folder(sys.argv[1:])
    options = [] if own is None else [f"--config-dir={own}"]
    words = [word for word in as_typed(row.job.overrides) if word != "train.resume=auto"]
    return shlex.join(["python", "train.py", *options, *words])


def _doubt(table: Table, row: Row) -> str:
    """Why the job with the best median may not be the fastest; "" where every measured spread lies above its own."""
    few = [rival for rival in table.rivals(row) if len(rival.times) < ENOUGH_STEPS]
    if few:
        steps = min(len(rival.times) for rival in few)
        return f" {steps} steps after the warm-up are too few to compare speeds; train for {ENOUGH_STEPS + 2} or more."
    if overlapping := table.overlapping(row):
        names = [other.label for other in overlapping[:_NAMED]]
        if others := len(overlapping) - len(names):
            names.append(f"{others} more")
        return f" Its spread (10–90 %) overlaps that of {_listed(names)}, so any of them may be the fastest."
    return ""


def _loss_differences(table: Table) -> Iterator[str]:
    """What the column of loss differences holds, and its largest."""
    compared = [row for row in table.rows if row.loss_difference is not None]
    if not compared:
        return
    references = {row.reference.label for row in compared}
    learned = ", ".join(key for key in table.keys if not is_of_speed(key))
    name = references.pop() if len(references) == 1 else f"the reference of the same {learned}"
    largest = max(compared, key=lambda row: row.loss_difference)
    text = f"Loss difference: relative to the training loss of {name}, the largest of all steps"
    if largest.loss_difference == 0:
        text += "; 0 for all jobs"
    elif largest.loss_difference < float("inf"):
        text += f"; {largest.loss_difference:.1g} at most ({largest.label})"
    yield f"{text}."


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _figures(table: Table) -> Iterator[tuple[str, str, dict[tuple[str, bool], str]]]:
    """Each figure's alternative text, its caption, and its addresses by the form of the page: (width, whether dark)."""
    from training.sweep.figure import NARROW, WIDE, colours, loss_figure, score_figure

    for alt, text, draw in (
        (f"{table.objective.title} of each job", _score_caption(table), score_figure),
        ("Training loss of each job", _loss_caption(table), loss_figure),
    ):
        forms = {}
        for width, inches in (("narrow", NARROW), ("wide", WIDE)):
            for dark in (True, False):
                with colours(dark):
                    figure = draw(table, inches)
                    if figure is not None:
                        forms[width, dark] = _svg_uri(figure)
        if forms:
            yield alt[0].upper() + alt[1:], text, forms


def _score_caption(table: Table) -> str:
    from training.sweep.figure import CHUNKS, numeric_axis

    if not table.by_time:
        return f"{'Larger' if table.objective.larger_is_better else 'Smaller'} is better."
    caption = (
        "Median of each job's steps after the warm-up; the whiskers reach from the 10th to the 90th percentile. "
        f"{'Steps are of different sizes, so the time per sample is shown. ' if table.per_sample else ''}"
    )
    if numeric_axis(table) == CHUNKS and any(row.summary.get("schedule") for row in table.timed):
        caption += (
            "Ideal: W / (1 − ideal bubble), that is W·(m+p−1)/m for GPipe and 1F1B with m chunks on p stages. "
            "W, the time of one stage if splitting the batch cost nothing, is the smallest measured "
            "time × (1 − ideal bubble), so the curve touches the job that comes nearest to its own ideal."
        )
    return caption


def _loss_caption(table: Table) -> str:
    from training.sweep.figure import coinciding, cut_off, difference

    sentences = ["Training loss over the steps."]
    if (highest := cut_off(table)) is not None:
        sentences.append(f"Losses above {highest:.3g} are cut off.")
    for group in coinciding(table):
        names = _listed([row.label for row in group])
        sentences.append(f"The curves of {names} lie on each other: they differ by {difference(group):.1g} at most.")
    return " ".join(sentences)


def _errors(table: Table) -> dict[str, list[str]]:
    """The labels of the jobs by their error, for errors of which the table shows only a line."""
    errors: dict[str, list[str]] = {}
    for row in table.rows:
        error = (row.job.error or "").strip()
        if error and error != row.problem:
            errors.setdefault(error, []).append(row.label)
    return errors


def _environment(table: Table) -> dict[str, str]:
    """The code and the machine of the first job that has recorded them; empty if none has."""
    records = (read_object(row.folder / "environment.json") for row in table.rows)
    record = next(filter(None, records), None)
    if record is None:
        return {}
    commit, memory = record["git_commit"], record["memory_bytes"]
    gpus = [f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in record["gpus"]]
    shown = {
        "code": commit and commit[:12] + (" with changes" if record["git_dirty"] else ""),
        "processor": f"{record['cpu']['model']}, {record['cpu']['cores']} cores",
        "memory": memory and f"{memory / 2**30:.0f} GiB",
        "GPUs": ", ".join(gpus),
        "system": f"{record['platform']}, Python {record['python']}",
        "packages": ", ".join(f"{name} {version}" for name, version in record["packages"].items() if version),
    }
    return {name: value for name, value in shown.items() if value}


def _svg_uri(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return _data_uri("image/svg+xml", buffer.getvalue())


def _data_uri(mime_type: str, content: bytes) -> str:
    return f"data:{mime_type};base64,{base64.b64encode(content).decode()}"
