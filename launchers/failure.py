"""Telling the worker that failed from those that fell with it: what one writes, what is made of it."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from launchers.errors import WorkerFailed

_LOG_LINES = 20

# What gloo and NCCL say when the other end has gone, or does not answer any more.
_PEER_MESSAGES = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "socket closed",
    "timed out waiting",
    "remote process exited",
    "communicator was aborted",
)


@dataclass(frozen=True)
class Death:
    """A worker that ended too early.

    exitcode: as multiprocessing gives it, -N for signal N. report: write_report's, None where there is none.
    """

    rank: int
    exitcode: int
    report: dict | None


def log_path(log_dir: str | os.PathLike, rank: int) -> Path:
    """Where a rank other than 0 writes what it has to say."""
    return Path(log_dir) / f"rank_{rank:04d}.log"


def is_peer_error(error: BaseException) -> bool:
    """Whether `error` says no more than that another process went away."""
    from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

    # The first error of the chain is the cause: a clean-up that fails on a closed connection hides a real
    # one.
    while earlier := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = earlier
    if isinstance(error, (ConnectionError, DistBackendError, DistNetworkError, DistStoreError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(message in text for message in _PEER_MESSAGES)


def write_report(path: str | os.PathLike, error: BaseException) -> dict:
    """Writes `error` to `path` as JSON, whole or not at all, and returns it: {"message", "peer", "timestamp"}.

    The message is the traceback without the launcher's own frame; the timestamp is in seconds since the epoch. Both
    names are torch's, whose agent reads the file too when it is the first to see the process gone, and raises
    KeyError without them.
    """
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    report = {"message": text, "peer": is_peer_error(error), "timestamp": time.time()}
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(report))
    partial.replace(path)
    return report


def read_report(path: str | os.PathLike) -> dict | None:
    """What write_report wrote to `path`; None when nothing whole is there."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return None


def root_cause(deaths: list[Death], log_dir: str | os.PathLike) -> WorkerFailed:
    """The error to show for `deaths`, of workers that the launcher did not end itself (at least one).

    A kill comes before a worker's own error, this before a silent exit, and a lost connection last: it is
    what the others see of each of them. Of two equals, the earlier.
    """
    death = min(deaths, key=_severity)
    if death.exitcode < 0:
        return WorkerFailed(death.rank, "signal", _signal_text(death) + _log_tail(death.rank, log_dir))
    if death.report is not None:
        return WorkerFailed(death.rank, "exception", death.report["message"])
    text = f"rank {death.rank} left with exit code {death.exitcode} before its work was done, raising nothing"
    return WorkerFailed(death.rank, "exit", text + _log_tail(death.rank, log_dir))


def _severity(death: Death) -> tuple[int, float]:
    if death.exitcode < 0:
        return 0, death.rank
    if death.report is None:
        return 2, death.rank
    return (3 if death.report["peer"] else 1), death.report["timestamp"]


def _signal_text(death: Death) -> str:
    number = -death.exitcode
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "no name"
    text = f"rank {death.rank} was killed by signal {number} ({name})"
    if number == signal.SIGKILL:
        text += (
            ". If nobody killed it, the machine ran out of memory: `dmesg` or the job's log says so; "
            "use fewer processes or smaller micro-batches"
        )
    return text


def _log_tail(rank: int, log_dir: str | os.PathLike) -> str:
    path = log_path(log_dir, rank)
    # Rank 0 has no log file: what it said is on the console already.
    if rank == 0 or not path.is_file():
        return ""
    lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return f"\nThe last lines of {path}:\n" + "\n".join(lines) if lines else ""
