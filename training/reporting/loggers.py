"""The interface of the loggers that ``logger=`` and ``loggers=`` select, and loggers without a service."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

from common.errors import UserError, brief
from conf.schema import Root
from training.reporting.metrics import METRICS, read_records, write_table

log = logging.getLogger("training")


class Logger(Protocol):
    """The interface of the loggers that ``logger=`` selects, such as ``WandbRun``.

    A logger may also have a method ``histogram(name, counts, edges, step)``, and a class attribute ``requires``: the
    pip name of the package that it needs.
    """

    def log(self, record: dict, step: int) -> None:
        """Log a line of metrics.jsonl."""

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Log the summary, which is None for a failed run, and close the run."""


class NoLogger(Logger):
    """Accepts the arguments of every logger and does nothing (``logger=none``)."""

    def __init__(self, **given: Any) -> None:
        pass


class CsvLogger(NoLogger):
    """Writes metrics.csv when the run ends: one line per step, with the evaluation after it.

    The records are read from metrics.jsonl, which also has the records of a resumed run in order.
    """

    def __init__(self, run_dir: str | Path, run_config: dict, run_name: str, file: str = "metrics.csv") -> None:
        """Store the run directory and the name of the file in it."""
        self._run_dir, self._file = Path(run_dir), file

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Write the file."""
        lines: dict[int, dict[str, Any]] = {}
        for record in read_records(self._run_dir / METRICS):
            lines.setdefault(record["step"], {}).update(record)
        write_table(self._run_dir / self._file, [*lines.values()])


class Loggers:
    """Several loggers as one. If a logger raises, it is removed after a warning, and the run continues.

    Attributes:
        all: The active loggers: all except ``NoLogger`` and those that have raised an error.
    """

    def __init__(self, sections: Mapping[str, Any], build: Callable[[str, Any], Logger]) -> None:
        """Build the logger of each section, by its key. Raises UserError if a section is wrong."""
        self.all: list[Logger] = []
        for place, section in sections.items():
            try:
                logger = build(place, section)
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
        """Show a histogram in all loggers that have this method.

        Args:
            name: The histogram's name, such as "gradients/head.weight".
            counts: The number of elements in each bin, [bins].
            edges: The edges of the bins, [bins + 1], ascending.
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
                    getattr(logger, method)(*deepcopy(arguments))  # a logger may change its arguments
            except Exception as error:
                self.all.remove(logger)
                _warn(type(logger).__name__, error)


def _warn(kind: str, error: Exception) -> None:
    log.warning("%s failed (%s). Training goes on without it; metrics.jsonl has every number", kind, brief(error))


def sections(cfg: Root) -> dict[str, Any]:
    """Return the sections of a configuration that describe loggers, by key: ``logger``, ``loggers.csv``."""
    return {"logger": cfg.logger, **{f"loggers.{name}": one for name, one in (cfg.loggers or {}).items()}}


def grouped(record: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a record under names that group them: train/loss, val/loss, test/accuracy."""
    names = {}
    for key, value in record.items():
        split, _, name = key.partition("_")
        names[f"{split}/{name}" if split in ("val", "test") else f"train/{key}"] = value
    names.pop("train/step", None)
    return names


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return the single numbers of ``grouped``, without the nulls, texts and lists that a callback may record."""
    return {
        name: float(value)
        for name, value in grouped(record).items()
        if isinstance(value, int | float) or getattr(value, "ndim", None) == 0  # of torch or numpy
    }
