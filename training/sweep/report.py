"""A sweep's end: its files, and what the console says."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from training.records.environment import mask_arguments
from training.sweep.page import COLUMNS, page
from training.sweep.table import Table, read_table, write_csv

CSV, FIGURE, PAGE = "sweep.csv", "sweep.png", "report.html"


def report(folder: Path) -> bool:
    """Write sweep.csv, sweep.png (where a job has trained) and report.html; returns whether every job has finished."""
    table = read_table(folder)
    if not table.rows:
        return True
    write_csv(table, folder / CSV)
    files = [CSV, PAGE]
    if table.timed:
        from training.sweep.figure import time_figure

        time_figure(table).savefig(folder / FIGURE)
        files.insert(1, FIGURE)
    command = shlex.join(["python", Path(sys.argv[0]).name, *mask_arguments(sys.argv[1:])])
    (folder / PAGE).write_text(page(table, command), encoding="utf-8")
    print("\n" + describe(table), f"files: {folder}: {' '.join(files)}", sep="\n", flush=True)
    return all(row.finished for row in table.rows)


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
