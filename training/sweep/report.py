"""The end of a sweep: its files, and the table on the console."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from conf.words import as_typed
from training.reporting import mask_secrets
from training.reporting.job_record import FINISHED, RUNNING, WAITING

if TYPE_CHECKING:
    from training.sweep.table import Table

CSV, FIGURE, PAGE = "sweep.csv", "sweep.png", "report.html"


class SweepReport(Callback):
    """Hydra's callback that reports a sweep when it has ended; the exit code is 1 if a job failed."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Writes the report into the sweep's directory."""
        # With launcher.wait=false the jobs are still queued or running.
        waited = OmegaConf.select(config, "launcher.wait", default=True)
        chosen = OmegaConf.select(config, "sweep.objective"), OmegaConf.select(config, "sweep.direction")
        if not report(Path(config.hydra.sweep.dir), waited, *chosen):
            raise SystemExit(1)


def report(folder: Path, ended: bool = True, objective: str | None = None, direction: str | None = None) -> bool:
    """Writes sweep.csv, sweep.png (if a job has trained) and report.html, and prints the table.

    Args:
        folder: The sweep's directory.
        ended: Whether every job should have ended by now.
        objective: ``sweep.objective``.
        direction: ``sweep.direction``.

    Returns:
        Whether the files are written and no job has failed, been interrupted or, if ``ended``, is unfinished.
    """
    from training.sweep.page import results  # numpy: Hydra imports this module before every run
    from training.sweep.table import read_table

    table = read_table(folder, objective, direction)
    if not table.rows:
        return True
    print("\n".join(["", *results(table), describe(table)]))
    try:
        print(f"files: {folder}: {' '.join(_write(table))}", flush=True)
    except OSError as error:
        print(f"error: the sweep's report cannot be written ({error})", file=sys.stderr)
        return False
    expected = (FINISHED,) if ended else (FINISHED, WAITING, RUNNING)
    return all(row.job.status in expected for row in table.rows)


def _write(table: Table) -> list[str]:
    """Writes the files and returns their names."""
    from training.sweep.page import page
    from training.sweep.table import write_csv

    write_csv(table, table.folder / CSV)
    command = shlex.join(["python", Path(sys.argv[0]).name, *mask_secrets(as_typed(sys.argv[1:]))])
    (table.folder / PAGE).write_text(page(table, command), encoding="utf-8")
    if not table.scored:
        return [CSV, PAGE]
    from training.sweep.figure import score_figure

    score_figure(table).savefig(table.folder / FIGURE)
    return [CSV, FIGURE, PAGE]


def describe(table: Table) -> str:
    """Formats the table for a console, one line per job; the reason why a job has no result ends its line."""
    columns = table.columns
    lines = [["job", *table.keys, "status", *columns]]
    for row in table.rows:
        results = [show(row) for show in columns.values()] if row.finished else []
        lines.append([str(row.job.num), *(row.value(key) for key in table.keys), row.status, *results])
    whole = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(map(len, cells)) for cells in zip(*whole, strict=True)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=False)).rstrip() for line in lines)
