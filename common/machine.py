"""What is known of this machine: cores, memory, and the environment of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_STYLES = {"bold": "1", "red": "1;31"}


def usable_cores() -> int:
    """Returns the number of cores that this process may run on (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> float:
    """Returns the bytes that processes can still take, by the kernel and by the container's limit.

    Infinite where neither is known.
    """
    available = [float("inf")]
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    group = Path("/sys/fs/cgroup")
    try:
        available.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # without a limit, memory.max reads "max"
        pass
    return min(available)


@contextmanager
def changed_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables of this process for a while; a value of None removes the variable."""
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
    """Returns the columns of the terminal that a stream leads to, 80 where it does not say; 0 where it leads elsewhere.

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
    """Returns a text in "bold" or "red" where a stream shows that: on a terminal, unless NO_COLOR is set."""
    plain = not terminal_width(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if plain else f"\033[{_STYLES[style]}m{text}\033[0m"
