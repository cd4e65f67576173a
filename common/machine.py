"""Properties of this machine: cores, memory, the environment of processes, and the console.

Printing never ends a run, even with a closed pipe, a lost terminal, a full disk or a narrow encoding.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from common.errors import UserError

_RARELY = 1000  # passes over younger objects before one over all; usually 10
_usual: list[int] = []  # the collector's thresholds before ``collect_rarely``
_SPINS = "10000"  # half a millisecond; GNU OpenMP's default of 300,000 is up to ten or more

_STYLES = {"bold": "1", "red": "1;31"}
_FAILURES = (OSError, ValueError)  # ValueError: the stream was closed in this process


def usable_cores() -> int:
    """Return the number of cores on which this process may run (its affinity mask, if the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> float:
    """Return the bytes of memory that are available, also under the limits of a container or a service."""
    import psutil

    available = [psutil.virtual_memory().available]
    for folder in _control_groups():
        with suppress(OSError, KeyError, ValueError):  # without a limit, memory.max reads "max"
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            # Files that the kernel has cached count as used, but are freed when memory is needed.
            fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            available.append(limit - used + int(fields["inactive_file"]))
    return min(available)


def check_memory(needed: float, what: str, way_out: str) -> None:
    """Check that ``needed`` bytes fit into the memory of this machine.

    Raises:
        UserError: They do not. The message contains ``what``, the setting that needs them, such as
            "data.samples=1000000", and ``way_out``, the fix.
    """
    if needed > (free := available_memory()):
        raise UserError(
            f"{what} needs {needed / 2**30:,.1f} GiB of memory, but {free / 2**30:,.1f} GiB are free (a container's "
            f"limit counts); {way_out}"
        )


def _control_groups() -> list[Path]:
    """Return the folders of this process's control groups (version 2), from its own to the outermost visible one."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    group = Path("/sys/fs/cgroup", *[line[3:].lstrip("/") for line in lines if line.startswith("0::")])
    return [group, *group.parents[:-3]]


@contextmanager
def changed_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables of this process inside the block. A value of None removes the variable."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def terminal_width(stream: TextIO) -> int:
    """Return the number of columns of a stream's terminal: 80 if unknown, 0 if the stream is not a terminal.

    A program that imitates a terminal may also report 0 columns.
    """
    with suppress(AttributeError, ValueError):  # of a closed stream, or an object in place of one
        if stream.isatty():
            with suppress(AttributeError, OSError, ValueError):
                return os.get_terminal_size(stream.fileno()).columns
            return 80
    return 0


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return a text in "bold" or "red" if the stream is a terminal with styles and NO_COLOR is not set."""
    plain = not terminal_width(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if plain else f"\033[{_STYLES[style]}m{text}\033[0m"


class _Unfailing:
    """Wraps a text stream, and drops text that cannot be written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        with suppress(AttributeError, *_FAILURES):
            stream.reconfigure(errors="replace")  # characters that its encoding lacks become question marks

    def write(self, text: str) -> int:
        with suppress(*_FAILURES):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream. If the disk is full, the next flush writes the rest of the text."""
        with suppress(*_FAILURES):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unfailing_output() -> Iterator[None]:
    """In the block, printing to stdout and stderr never fails, also in libraries."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Unfailing(open(os.devnull, "w") if stream is None else stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in filter(None, before):
            try:
                stream.flush()
            except _FAILURES:  # Python flushes it again at its exit, and fails if it cannot, so to /dev/null
                with suppress(*_FAILURES, AttributeError):  # an object in place of a stream may have no descriptor
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                    stream.flush()


def spin_briefly() -> None:
    """Let OpenMP's threads spin for half a millisecond before they sleep. Call this before torch is imported.

    A spinning thread may take the core that another thread needs: on a busy machine, the steps of a small model took
    five times as long. If threads never spin, these steps take up to 1.4 times as long on a quiet machine. Variables
    that are already set stay. Child processes inherit them.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def collect_rarely() -> None:
    """Put off the garbage collector's passes over all objects, until ``collect_as_usual``.

    Imports make a million objects that stay, and the collector would go through them five times, which takes 3 % of the
    time from a command to its first step.
    """
    _usual[:] = gc.get_threshold()
    gc.set_threshold(_usual[0], _usual[1], _RARELY)


def collect_as_usual() -> None:
    """Undo ``collect_rarely``, if it was called. What exists stays, so that no pass goes through it."""
    if _usual:
        gc.freeze()
        gc.set_threshold(_usual[0], _usual[1], _usual[2])
