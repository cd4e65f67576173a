"""report.html: one page without scripts and without external resources."""

from __future__ import annotations

import base64
import datetime
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from training.sweep.table import Table, read_object, seconds


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
        results=list(_results(table)),
        figures=list(_figures(table)) if table.timed else [],
        errors=_errors(table),
        timelines=[
            (row, _data_uri("image/png", path.read_bytes()))
            for row in table.rows
            if (path := row.folder / "timeline.png").exists()
        ],
        environment=_environment(table),
    )


def _results(table: Table) -> Iterator[str]:
    """The best job of each model in a sentence."""
    best = [row for row in table.rows if row.best]
    for row in best:
        slowest = max(table.rivals(row), key=lambda rival: rival.cost)
        whose = f" of {row.summary['model']}" if len(best) > 1 else ""
        cost = f"{seconds(row.cost)} per {'sample' if table.per_sample else 'step'}"
        yield f"Fastest{whose}: {row.label} with {cost}, {slowest.cost / row.cost:.2f}x as fast as {slowest.label}."


def _figures(table: Table) -> Iterator[tuple[str, str, str, str]]:
    """Each figure's alternative text, caption, and the addresses of its wide and its narrow form."""
    from training.sweep.figure import CHUNKS, NARROW, WIDE, loss_figure, numeric_axis, time_figure

    caption = (
        "Median of each job's steps after the warm-up; the bars reach from the 10th to the 90th percentile. "
        f"{'Steps are of different sizes, so the time per sample is shown. ' if table.per_sample else ''}"
    )
    if numeric_axis(table) == CHUNKS and any(row.summary.get("schedule") for row in table.timed):
        caption += (
            "Ideal: W / (1 − ideal bubble), that is W·(m+p−1)/m for GPipe and 1F1B with m chunks on p stages. "
            "W, the time of one stage if splitting the batch cost nothing, is the smallest measured "
            "time × (1 − ideal bubble), so the curve touches the job that comes nearest to its own ideal."
        )
    for alt, text, draw in (
        ("Time per step of each job", caption, time_figure),
        ("Training loss of each job", "Training loss over the steps.", loss_figure),
    ):
        drawn = [draw(table, width) for width in (WIDE, NARROW)]
        if None not in drawn:
            yield alt, text, *map(_svg_uri, drawn)


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
