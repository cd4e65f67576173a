"""Writes a run's numbers to metrics.jsonl, loggers and progress bar, and describes the environment it ran in."""

from __future__ import annotations

import csv
import importlib.metadata
import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

from common.errors import UserError
from common.machine import terminal_width, usable_cores
from conf.masking import mask_secrets
from training.reporting.console import number
from training.reporting.metrics import METRICS, SUMMARY, MetricsFile, read_records, write_json

SECONDS_BETWEEN_LINES = 5.0
STEPS_IN_AVERAGE = 30
PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "wandb", "tiktoken", "safetensors", "numpy")
_GIT_NEEDS = ("PATH", "HOME", "XDG_CONFIG_HOME")

log = logging.getLogger("training")


class Recorder:
    """Writes rank 0's numbers to metrics.jsonl, to the loggers and to the progress bar.

    On other ranks it does nothing.
    """

    def __init__(
        self,
        run_dir: Path,
        logger: Loggers | None,
        total_steps: int,
        first_step: int = 1,
        resumed: bool = False,
    ) -> None:
        """Describe the environment and open the files. A resumed run drops the records from ``first_step`` on.

        ``logger`` is None on ranks other than 0.
        """
        self._logger, self._run_dir = logger, run_dir
        if logger is None:
            return
        write_json(run_dir / "environment.json", describe())
        self._metrics = MetricsFile(run_dir / METRICS)
        if resumed:
            self._metrics.truncate_after(first_step - 1)
        self._progress = Progress(total_steps, first_step)

    def lacks_evaluation(self, step: int) -> bool:
        """Return whether metrics.jsonl has a record of ``step`` but no evaluation after it. False on other ranks."""
        if self._logger is None:
            return False
        records = [record for record in read_records(self._run_dir / METRICS) if record.get("step") == step]
        return bool(records) and not any("val_loss" in record for record in records)

    def step(self, record: dict[str, Any], note: str = "") -> None:
        """Write the record of an optimizer step and show it, with a remark, on the progress bar."""
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
        """Write summary.json and close everything.

        Args:
            summary: The content of summary.json; None for a failed run, which gets no such file.
        """
        if self._logger is None:
            return
        self._progress.close()
        if summary is not None:
            write_json(self._run_dir / SUMMARY, summary)
        self._metrics.close()
        self._logger.finish(summary, exit_code=0 if summary is not None else 1)


class Progress:
    """The one line that a user watches: a bar on a terminal, plain lines everywhere else.

    Shows step, loss, throughput and time left.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 1,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the bar if ``stream``, standard error if None, is a terminal. ``clock`` returns seconds.

        An evaluation has no steps, and no bar.
        """
        self._total, self._first = total_steps, first_step
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._last_line: float | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=STEPS_IN_AVERAGE + 1)
        self._bar = self._open_bar() if total_steps > 0 and terminal_width(self._stream) > 0 else None

    def update(self, record: Mapping[str, Any], note: str = "") -> None:
        """Show the record of a step, with a remark at the end of the line.

        If the stream is not a terminal, only the first and the last step and one per ``SECONDS_BETWEEN_LINES`` are
        shown. Use ``say`` for messages that must always be shown.
        """
        now, step = self._clock(), record["step"]
        self._recent.append((now, step))
        due = self._last_line is None or step >= self._total or now - self._last_line >= SECONDS_BETWEEN_LINES
        if self._bar is None and not due:
            return
        rate = "tokens_per_s" if "tokens_per_s" in record else "samples_per_s"
        left = self.seconds_left()
        parts = [
            f"loss {number('loss', record['loss'])}",
            f"{number(rate, record[rate])} {rate.replace('_per_', '/')}",
            f"{duration(left)} left" if left is not None and step < self._total else "",
            note,
        ]
        text = "  ".join(part for part in parts if part)
        if self._bar is not None:
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            self._last_line = now
            width = max(4, len(str(self._total)))
            self.say(f"step {step:>{width}}/{self._total}  {text}")

    def seconds_left(self) -> float | None:
        """Return the seconds until the last step at the pace of the last ``STEPS_IN_AVERAGE`` steps.

        None before the second step: the time until the end of the first step is not counted, because it includes
        compiling and warming up, which happen once.
        """
        if len(self._recent) < 2:
            return None
        (started, first), (now, last) = self._recent[0], self._recent[-1]
        if last <= first:
            return None
        return (now - started) / (last - first) * max(0, self._total - last)

    def say(self, text: str) -> None:
        """Print ``text`` on a separate line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it is and move to a new line. A second call does nothing."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None

    def _open_bar(self):
        from tqdm import tqdm

        return tqdm(
            total=self._total,
            initial=self._first - 1,
            file=self._stream,
            dynamic_ncols=True,
            miniters=1,  # otherwise the bar would not move for a while if steps take unequal times
            colour=None if os.environ.get("NO_COLOR") else "green",
            bar_format="step {n_fmt}/{total_fmt} |{bar:20}| {desc}",
        )


def duration(seconds: float) -> str:
    """Return seconds in words, in two units: ``45 s``, ``1 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    rest = max(0, round(seconds))
    for size, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if rest >= size:
            return f"{rest // size} {name} {rest % size // smaller} {smaller_name}"
    return f"{rest} s"


def progress(done: int, total: int, since: float) -> str:
    """Return how far a command is, and how long the rest takes at the same pace: ``18 of 27, 3 min 5 s left``.

    ``since`` is the monotonic time at which the first of ``total`` parts began.
    """
    left = (time.monotonic() - since) / done * (total - done)
    return f"{done} of {total}" + f", {duration(left)} left" * (done < total)


# -- what a run was made with ----------------------------------------------------------------------------------------


def describe(command: list[str] | None = None) -> dict[str, Any]:
    """Describe the commit, machine, packages and command of this run.

    The result has neither environment variables nor the host's name. Values that cannot be determined are None. This
    asks torch for GPUs, so call it in a process that may use them.

    ``command`` is the command line, ``sys.argv`` if None; its secrets are masked.
    """
    commit, dirty = git_state()
    return {
        "git_commit": commit,
        "git_dirty": dirty,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {"model": _cpu_model(), "cores": usable_cores()},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in PACKAGES},
        "command": mask_secrets(sys.argv if command is None else command),
    }


def git_state(tracked_file: str | Path = __file__) -> tuple[str | None, bool | None]:
    """Return the commit of this project's checkout, and whether files were changed; both None if it is not a checkout.

    This asks git about a file, not a folder, because a copy of the project inside another repository is not part of it.
    """
    file = Path(tracked_file).resolve()
    folder = file.parent
    # Git must not get variables of a run's configuration (GIT_CONFIG_…, GIT_DIR), which could make it start a program.
    kept = {name: os.environ[name] for name in _GIT_NEEDS if name in os.environ}
    # Without optional locks, so that recording a run cannot make a commit fail that is made at the same time.
    git = partial(_run, "git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), env=kept)
    if git("ls-files", "--error-unmatch", file.name) is None:
        return None, None
    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain")
    return commit, None if changes is None else bool(changes)


def _run(*command: str, env: Mapping[str, str] | None = None) -> str | None:
    """Return a command's output; None if it fails, hangs or does not exist. ``env`` is its environment."""
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "errors": "replace", "timeout": 5.0}
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, env=env, **options).strip()
    return None


def _cpu_model() -> str | None:
    with suppress(OSError):
        if found := re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE):
            return found[1].strip()
    return _run("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or None


def _gpus() -> list[dict]:
    import torch

    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in properties]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- loggers ---------------------------------------------------------------------------------------------------------


class Logger(Protocol):
    """The interface of the loggers that ``logger=`` selects, such as ``WandbRun``.

    A logger may also have a method ``histogram(name, counts, edges, step)``, and a class attribute ``requires``: the
    pip name of the package that it needs.
    """

    def log(self, record: dict, step: int) -> None:
        """Log a line of metrics.jsonl."""

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Log the summary, which is None for a failed run, and close the run."""


class NoLogger:
    """Accepts the arguments of every logger and does nothing (``logger=none``)."""

    def __init__(self, **given: Any) -> None:
        pass

    def log(self, record: dict, step: int) -> None:
        """See ``Logger``."""

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """See ``Logger``."""


class CsvLogger(NoLogger):
    """Writes metrics.csv when the run ends: one line per step, with the evaluation after it.

    It reads metrics.jsonl, which has every record, those of a resumed run in order.
    """

    def __init__(self, run_dir: str | Path, run_config: dict, run_name: str, file: str = "metrics.csv") -> None:
        """Note the run directory and the name of the file in it."""
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
    """Several loggers as one. If a logger raises, it is removed after a warning, and the run continues.

    Attributes:
        all: The loggers, without ``NoLogger`` and those that have raised.
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
        """Show a histogram in the loggers that can show it.

        Args:
            name: Its name, such as "gradients/head.weight".
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
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    log.warning("%s failed (%s). Training goes on without it; metrics.jsonl has every number", kind, text)


def sections(cfg: Any) -> dict[str, Any]:
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
