"""Where a run's numbers are shown besides metrics.jsonl: one logger, or several."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

from common.errors import UserError
from training.reporting.metrics import METRICS, read_records

log = logging.getLogger("training")


class Logger(Protocol):
    """What an option of ``logger=`` builds, such as ``WandbRun``.

    It may also have ``histogram(name, counts, edges, step)``, and an attribute ``requires`` of its class: the package
    that it needs, by its name for pip.
    """

    def log(self, record: dict, step: int) -> None:
        """Take a line of metrics.jsonl."""

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Take the summary, which is None for a run that failed, and close the run."""


class NoLogger:
    """Takes what every logger takes and does nothing (``logger=none``)."""

    def __init__(
        self, run_dir: str | Path | None = None, run_config: dict | None = None, run_name: str | None = None
    ) -> None:
        pass

    def log(self, record: dict, step: int) -> None:
        """See ``Logger``."""

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """See ``Logger``."""


class CsvLogger(NoLogger):
    """Writes metrics.csv when the run ends: one line per step, with the evaluation after it.

    Its source is metrics.jsonl, which has every record, those of a resumed run in order.
    """

    def __init__(self, run_dir: str | Path, run_config: dict, run_name: str, file: str = "metrics.csv") -> None:
        """Take the run directory, and the name of the file in it."""
        self._run_dir, self._file = Path(run_dir), file

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Write the file."""
        lines: dict[int, dict[str, Any]] = {}
        for record in read_records(self._run_dir / METRICS):
            lines.setdefault(record["step"], {}).update(record)
        columns = list(dict.fromkeys(name for line in lines.values() for name in line))
        with open(self._run_dir / self._file, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(lines.values())


class Loggers:
    """Several loggers as one. One that raises is warned about and left out from then on; the run goes on.

    Attributes:
        all: Those that take something.
    """

    def __init__(self, sections: Sequence[Any], build: Callable[[Any], Logger]) -> None:
        """Build the loggers.

        Args:
            sections: See ``sections``.
            build: Returns the logger that a section describes.

        Raises:
            UserError: A section is wrong.
        """
        self.all: list[Logger] = []
        for section in sections:
            try:
                logger = build(section)
                if type(logger) is not NoLogger:
                    self.all.append(logger)
            except UserError:
                raise
            except Exception as error:
                _warn(section["_target_"].rpartition(".")[2], error)

    def log(self, record: dict, step: int) -> None:
        """See ``Logger``."""
        self._call("log", record, step)

    def histogram(self, name: str, counts: Sequence[float], edges: Sequence[float], step: int) -> None:
        """Show how numbers are distributed, where a logger can.

        Args:
            name: Such as "gradients/head.weight".
            counts: [bins].
            edges: [bins + 1], ascending.
            step: The optimizer step.
        """
        self._call("histogram", name, counts, edges, step)

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """See ``Logger``."""
        self._call("finish", summary, exit_code)

    def _call(self, method: str, *arguments: Any) -> None:
        for logger in list(self.all):
            try:
                if hasattr(logger, method):
                    getattr(logger, method)(*deepcopy(arguments))  # one may change what it is given
            except Exception as error:
                self.all.remove(logger)
                _warn(type(logger).__name__, error)


def _warn(kind: str, error: Exception) -> None:
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    log.warning("%s failed (%s). Training goes on without it; metrics.jsonl has every number", kind, text)


def sections(cfg: Any) -> list[Any]:
    """Return the sections of a configuration that describe loggers: ``logger`` and those of ``loggers``."""
    return [cfg.logger, *(cfg.loggers or {}).values()]


def grouped(record: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a record under names that group them: train/loss, val/loss, test/accuracy."""
    names = {}
    for key, value in record.items():
        split, _, name = key.partition("_")
        names[f"{split}/{name}" if split in ("val", "test") else f"train/{key}"] = value
    names.pop("train/step", None)
    return names
