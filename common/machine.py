"""What is known of this machine: cores, memory, the environment of processes, and the console.

Printing never ends a run: a closed pipe, a lost terminal, a full disk and a narrow encoding are survived.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from common.errors import UserError

_SPINS = "10000"  # half a millisecond; GNU OpenMP's own number, 300,000, is up to some ten

_STYLES = {"bold": "1", "red": "1;31"}
_FAILURES = (OSError, ValueError)  # ValueError: the stream was closed in this process


def usable_cores() -> int:
    """Return the number of cores that this process may run on (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> float:
    """Return the bytes that processes can still take, by the kernel and by the limits of the container or service."""
    import psutil

    available = [psutil.virtual_memory().available]
    for folder in _control_groups():
        with suppress(OSError, KeyError, ValueError):  # without a limit, memory.max reads "max"
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            # What the kernel has cached of files counts as used, and makes way.
            fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            available.append(limit - used + int(fields["inactive_file"]))
    return min(available)


def check_memory(needed: float, what: str, way_out: str) -> None:
    """Check that ``needed`` bytes fit into the memory of this machine.

    Raises:
        UserError: They do not. The message says ``what`` needs them, such as "data.samples=1000000", and ``way_out``.
    """
    free = available_memory()
    if needed > free:
        raise UserError(
            f"{what} needs {needed / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free (a container's "
            f"limit counts); {way_out}"
        )


def _control_groups() -> list[Path]:
    """Return the folders of this process's control groups (version 2), from its own to the outermost that is seen."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = Path("/sys/fs/cgroup", *[line[3:].lstrip("/") for line in lines if line.startswith("0::")])
    return [own, *own.parents[:-3]]


@contextmanager
def changed_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables of this process for a while; a value of None removes the variable."""
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
    """Return the columns of the terminal that a stream leads to, 80 where it does not say; 0 where it leads elsewhere.

    A terminal may have no columns either: that of a program that only pretends to be one.
    """
    try:
        if not stream.isatty():
            return 0
    except (AttributeError, ValueError):
        return 0
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, OSError, ValueError):
        return 80


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return a text in "bold" or "red" where a stream shows that: on a terminal, unless NO_COLOR is set."""
    plain = not terminal_width(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if plain else f"\033[{_STYLES[style]}m{text}\033[0m"


class _Unfailing:
    """A text stream that drops what cannot be written; in all else it is the stream that it wraps."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        with suppress(AttributeError, *_FAILURES):
            stream.reconfigure(errors="replace")  # characters that its encoding lacks become question marks

    def write(self, text: str) -> int:
        with suppress(*_FAILURES):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream. What a full disk does not take now is tried again at the next flush."""
        with suppress(*_FAILURES):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unfailing_output() -> Iterator[None]:
    """Let everything in the block, libraries included, print to stdout and stderr without ever failing."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Unfailing(open(os.devnull, "w") if stream is None else stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in filter(None, before):
            try:
                stream.flush()
            except _FAILURES:  # Python flushes it again at its exit, and fails if it cannot: into /dev/null
                with suppress(*_FAILURES, AttributeError):  # what stands for a stream may have no descriptor
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                    stream.flush()


def spin_briefly() -> None:
    """Have OpenMP's threads wait actively for half a millisecond, and then sleep. Called before torch is imported.

    A thread that spins for one that has no core takes the core away from it: on a busy machine the steps of a small
    model took five times as long. Threads that never spin make them up to 1.4 times as long on a quiet one. What the
    environment already says stays, and processes that this one starts inherit it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
