"""Trackio: the run's numbers in a database of this machine, which `trackio show` draws."""

from __future__ import annotations

import contextlib
import io
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.machine import changed_environment
from conf.masking import mask_secrets
from training.reporting.loggers import scalars
from training.reporting.metrics import METRICS, read_records
from training.reporting.wandb_run import run_id

ID_FILE = "trackio_id.txt"


class TrackioRun:
    """One Trackio run on this machine, without a network. ``trackio sync`` uploads its project to a Space.

    A resumed training continues the same run. The steps that it repeats are removed first, and the records of
    metrics.jsonl are logged that a killed process has not written.
    """

    requires = "trackio"

    def __init__(
        self,
        run_dir: str | Path,
        run_config: dict,
        run_name: str,
        project: str = "one-word-parallel",
        group: str | None = None,
    ) -> None:
        """Start the run with the options of conf/logger/trackio.yaml; ``run_config`` is stored with secrets masked."""
        import trackio  # pyright: ignore[reportMissingImports]  # only logger=trackio needs it
        from trackio.fragments import import_inbox_dir  # pyright: ignore[reportMissingImports]
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        name = f"{run_name}-{run_id(Path(run_dir) / ID_FILE)}"  # Trackio finds a run by its name
        records = read_records(Path(run_dir) / METRICS)
        # Private, as all of its storage: trackio 0.43. On a network file system it writes into an inbox.
        import_inbox_dir()
        if (path := SQLiteStorage.get_project_db_path(project)).exists():
            with contextlib.closing(sqlite3.connect(path, timeout=30)) as database, database:
                last = records[-1]["step"] if records else 0
                database.execute("DELETE FROM metrics WHERE run_name = ? AND step > ?", (name, last))
        self._known = {(row["step"], _kind(row)) for row in SQLiteStorage.get_logs(project, name)}
        given = {"project": project, "name": name, "group": group or run_config.get("model", {}).get("name")}
        with changed_environment({"TRACKIO_SPACE_ID": None, "TRACKIO_SERVER_URL": None}), _quiet():
            self._run: Any = trackio.init(**given, config=mask_secrets(run_config), resume="allow", embed=False)
        for record in records:
            self.log(record, record["step"])

    def log(self, record: dict, step: int) -> None:
        """Add the numbers of a record, unless the resumed run has them."""
        self._log(scalars(record), step)

    def histogram(self, name: str, counts: Sequence[float], edges: Sequence[float], step: int) -> None:
        """Add a histogram, see ``Loggers.histogram``."""
        import trackio  # pyright: ignore[reportMissingImports]

        self._log({name: trackio.Histogram(np_histogram=(counts, edges))}, step)

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Add the numbers of the summary, and close the run."""
        if summary is not None:
            numbers = {key: value for key, value in summary.items() if isinstance(value, int | float)}
            self._log({f"summary/{key}": value for key, value in numbers.items()}, summary["steps"])
        import trackio  # pyright: ignore[reportMissingImports]

        with _quiet():
            trackio.finish()  # not the run's own, which Trackio would call again at the end of the process

    def _log(self, numbers: dict[str, Any], step: int) -> None:
        if (step, _kind(numbers)) not in self._known:
            self._run.log(numbers, step=step)


def _kind(numbers: dict[str, Any]) -> str:
    """Return the group of a record's numbers: train, val, test or summary; the name of a histogram."""
    name = next(iter(numbers), "")
    return name.partition("/")[0] if name.startswith(("train/", "val/", "test/", "summary/")) else name


def _quiet() -> contextlib.AbstractContextManager[Any]:
    return contextlib.redirect_stdout(io.StringIO())
