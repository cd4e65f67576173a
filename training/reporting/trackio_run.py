"""Trackio: the run's numbers in a database of this machine, which `trackio show` draws."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from common.machine import changed_environment
from conf.masking import mask_secrets
from training.reporting.loggers import scalars
from training.reporting.metrics import METRICS, read_records
from training.reporting.wandb_run import run_id

ID_FILE = "trackio_id.txt"
_LOCAL = {"TRACKIO_SPACE_ID": None, "TRACKIO_SERVER_URL": None}


class TrackioRun:
    """One Trackio run on this machine, without a network. ``trackio sync`` uploads its project to a Space.

    A resumed training replaces its run by one with the records of metrics.jsonl, under the name of the present layout:
    Trackio cannot remove single steps, and a killed process loses its last ones.
    """

    requires = "trackio"

    def __init__(
        self, run_dir: str | Path, run_config: dict, run_name: str, project: str = "one-word-parallel"
    ) -> None:
        """Start the run with the options of conf/logger/trackio.yaml; ``run_config`` is stored with secrets masked."""
        import trackio  # pyright: ignore[reportMissingImports]  # only logger=trackio needs it
        from trackio.fragments import import_inbox_dir  # pyright: ignore[reportMissingImports]
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        number = run_id(Path(run_dir) / ID_FILE)
        name = f"{run_name}-{number}"
        # Private: trackio 0.43. On a network file system, Trackio's records are first in an inbox.
        import_inbox_dir()
        for earlier in SQLiteStorage.get_runs(project):
            if earlier.endswith(f"-{number}"):
                SQLiteStorage.delete_run(project, earlier)
        with changed_environment(_LOCAL), redirect_stdout(io.StringIO()):
            given: dict[str, Any] = {"group": run_config["model"]["name"], "config": mask_secrets(run_config)}
            self._run: Any = trackio.init(project, name, **given, embed=False)
        for record in read_records(Path(run_dir) / METRICS):
            self.log(record, record["step"])

    def log(self, record: dict, step: int) -> None:
        """Add the numbers of a record."""
        self._run.log(scalars(record), step=step)

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Add the numbers of the summary, and close the run."""
        import trackio  # pyright: ignore[reportMissingImports]

        if summary is not None:
            numbers = {f"summary/{key}": value for key, value in summary.items() if isinstance(value, int | float)}
            self._run.log(numbers, step=summary["steps"])
        with redirect_stdout(io.StringIO()):
            trackio.finish()  # not the run's own, which Trackio would call again at the end of the process
