"""Writes a run's numbers to metrics.jsonl, to the loggers and to the progress bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.reporting.environment import describe
from training.reporting.loggers import Loggers
from training.reporting.metrics import METRICS, SUMMARY, MetricsFile, write_json
from training.reporting.page import write_page
from training.reporting.progress import Progress


class Recorder:
    """Writes rank 0's numbers to metrics.jsonl, to the loggers and to the progress bar.

    On other ranks it does nothing.

    Attributes:
        run_dir: The run directory.
    """

    def __init__(self, run_dir: Path, logger: Loggers | None, total_steps: int, first_step: int = 1) -> None:
        """Describe the environment and open the files. ``logger`` is None on ranks other than 0."""
        self._logger, self.run_dir = logger, run_dir
        if logger is None:
            return
        write_json(run_dir / "environment.json", describe())
        self._metrics = MetricsFile(run_dir / METRICS)
        self._progress = Progress(total_steps, first_step)

    def step(self, record: dict[str, Any], note: str = "") -> None:
        """Write the record of an optimizer step, and show it with a note on the progress bar."""
        self.record(record)
        if self._logger is not None:
            self._progress.update(record, note)

    def record(self, record: dict[str, Any]) -> None:
        """Write a record, which has a "step", to metrics.jsonl and to the loggers."""
        if self._logger is not None:
            self._metrics.write(record)
            self._logger.log(record, record["step"])

    def histogram(self, *args: Any) -> None:
        """Show a histogram in the loggers; see ``Loggers.histogram``."""
        if self._logger is not None:
            self._logger.histogram(*args)

    def say(self, text: str) -> None:
        """Print a sentence above the progress bar."""
        if self._logger is not None:
            self._progress.say(text)

    def close(self, summary: dict | None) -> None:
        """Write summary.json and the page of the pictures, and close everything.

        Args:
            summary: The content of summary.json; None for a failed run, which has no summary.json.
        """
        if self._logger is None:
            return
        self._progress.close()
        if summary is not None:
            write_json(self.run_dir / SUMMARY, summary)
            write_page(self.run_dir)
        self._metrics.close()
        self._logger.finish(summary, exit_code=0 if summary is not None else 1)
