"""A sweep's end: its files, and what the console says."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from training.reporting import mask_secrets
from training.sweep.page import COLUMNS, page
from training.sweep.record import FINISHED, RUNNING, WAITING
from training.sweep.table import Table, read_table, write_csv

CSV, FIGURE, PAGE = "sweep.csv", "sweep.png", "report.html"


def report(folder: Path, ended: bool = True) -> bool:
    """Write sweep.csv, sweep.png (where a job has trained) and report.html and show the table.

    ended    whether every job should have come to an end by now
    returns  whether all is well: every file written, no job failed, and every one finished where they have ended
    """
    table = read_table(folder)
    if not table.rows:
        return True
    print("\n" + describe(table))
    try:
        print(f"files: {folder}: {' '.join(_write(table, folder))}", flush=True)
    except OSError as error:
        print(f"error: the sweep's report cannot be written ({error})", file=sys.stderr)
        return False
    well = (FINISHED,) if ended else (FINISHED, WAITING, RUNNING)
    return all(row.job.status in well for row in table.rows)


def _write(table: Table, folder: Path) -> list[str]:
    """Returns the names of the files."""
    write_csv(table, folder / CSV)
    command = shlex.join(["python", Path(sys.argv[0]).name, *mask_secrets(sys.argv[1:])])
    (folder / PAGE).write_text(page(table, command), encoding="utf-8")
    if not table.timed:
        return [CSV, PAGE]
    from training.sweep.figure import time_figure

    time_figure(table).savefig(folder / FIGURE)
    return [CSV, FIGURE, PAGE]


def describe(table: Table) -> str:
    """The table for a console: a line for each job."""
    columns = {name: show for name, show in COLUMNS.items() if any(show(row) for row in table.rows)}
    lines = [["job", *table.keys, "status", *columns]]
    for row in table.rows:
        own = [str(row.job.num), *(row.values.get(key, "") for key in table.keys)]
        results = [show(row) for show in columns.values()]
        lines.append([*own, row.job.status, *results] if row.finished else [*own, f"{row.job.status}: {row.problem}"])
    widths = [0] * len(lines[0])
    for line in lines:
        if len(line) == len(widths):
            widths = [max(width, len(cell)) for width, cell in zip(widths, line, strict=True)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=False)).rstrip() for line in lines)
