"""Reports of failed workers, and the error of the worker that failed first."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from common.errors import LaunchError, format_exception, message_for_user
from common.files import write_atomically
from launchers.stopping import Stopped

_LOG_LINES = 20

# The messages of gloo and NCCL if a peer has ended or does not answer.
_PEER_MESSAGES = (
    "connection closed by peer", "connection reset", "broken pipe", "connection refused", "socket closed",
    "timed out waiting", "timeout waiting for key", "wait timeout", "application timeout caused pair closure",
    "remote process exited", "communicator was aborted",
)  # fmt: skip


class WorkerFailed(LaunchError):
    """A local worker ended before its work was done. This is the first failure, not a consequence of it.

    Attributes:
        rank: The global rank that failed first.
        kind: "exception" (it raised), "message" (it raised a UserError), "signal" (it was killed), "exit" (it ended
            without an error) or "stall" (other ranks waited for it until they timed out).
        text: The traceback or message of that rank; otherwise a description and the last lines of its log.
    """

    def __init__(self, rank: int, kind: str, text: str):
        super().__init__(rank, kind, text)
        self.rank = rank
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return f"rank {self.rank} raised\n{self.text}" if self.kind == "exception" else self.text


class EndedTogether(LaunchError):
    """Rank 0 has ended before the run began, and this rank ends with it.

    Attributes:
        exit_code: The exit code of rank 0.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Death:
    """How a worker has ended.

    Attributes:
        rank: Its global rank.
        exitcode: Its exit code; -N if signal N ended it.
        report: The report from `write_report`; empty if there is none.
        finished: Whether its work was done.
    """

    rank: int
    exitcode: int
    report: dict
    finished: bool = False

    @property
    def lost_a_peer(self) -> bool:
        """Whether the worker only reports that another worker was lost or did not answer."""
        return self.exitcode >= 0 and self.report.get("peer", False)

    @property
    def aborted(self) -> bool:
        """Whether the worker aborted without a report, as after a time-out of NCCL's watchdog."""
        return self.exitcode == -signal.SIGABRT and not self.report


def log_path(log_dir: str | os.PathLike, rank: int) -> Path:
    """Return the file for the output of a rank other than 0."""
    return Path(log_dir) / f"rank_{rank:04d}.log"


def remove_empty_log(log_dir: str | os.PathLike, rank: int) -> None:
    """Remove the log of a rank that has printed nothing."""
    path = log_path(log_dir, rank)
    if path.exists() and path.stat().st_size == 0:
        path.unlink()


def is_peer_error(error: BaseException) -> bool:
    """Return whether ``error`` only says that another process was lost or does not answer."""
    from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

    error = _first(error)
    if isinstance(error, EndedTogether):
        return True
    if isinstance(error, BrokenPipeError):
        return False  # it is about a pipe of this process; torch reports a lost peer in its own classes
    if isinstance(error, (ConnectionError, DistBackendError, DistNetworkError, DistStoreError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(message in text for message in _PEER_MESSAGES)


def is_timeout(error: BaseException) -> bool:
    """Return whether a peer error reports a timeout, not a closed connection."""
    return re.search("timed? ?out", str(_first(error)), re.IGNORECASE) is not None


def _first(error: BaseException) -> BaseException:
    """Return the first error of the chain. A clean-up may fail later, on a closed connection, and hide it."""
    while earlier := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = earlier
    return error


def write_report(path: str | os.PathLike, error: BaseException) -> dict:
    """Write a report of ``error`` to a file as JSON, completely or not at all, and return the report.

    "message" is the traceback without the launcher's own frame, "peer" whether it is an ``is_peer_error``, "timestamp"
    the time in seconds since the epoch, "repeats" the error's attribute of that name (it would occur again after a
    restart), "for_user" the message of a UserError, which needs no traceback, and "stopped" that of a Stopped.
    """
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = format_exception(error, frames)
    report = {"message": text, "peer": is_peer_error(error), "timestamp": time.time()}
    report["repeats"] = getattr(error, "repeats", False)
    report["for_user"] = None if report["peer"] else message_for_user(error)
    report["stopped"] = str(error) if isinstance(error, Stopped) else None
    write_atomically(Path(path), json.dumps(report))
    return report


def read_report(path: str | os.PathLike) -> dict | None:
    """Return the report that `write_report` wrote to `path`; None if there is no complete one.

    It is {} for a rank that has done its work. A worker's file is then empty, so that it can be made on a full disk.
    """
    try:
        return json.loads(Path(path).read_text() or "{}")
    except (OSError, ValueError):
        return None


def root_cause(deaths: list[Death], log_dir: str | os.PathLike) -> WorkerFailed:
    """Return the error of the worker that failed first. Workers that the launcher has ended are left out.

    A kill comes before an error of a worker, an error before a silent exit or an abort. A lost connection comes last,
    because the other workers see it in all these cases. Among equal kinds, the earlier failure is returned.
    """
    death = min(deaths, key=_severity)
    if death.exitcode < 0:
        return WorkerFailed(death.rank, "signal", _signal_text(death) + _log_tail(death.rank, log_dir))
    if death.report:
        words = death.report.get("for_user")
        return WorkerFailed(death.rank, *(("message", words) if words else ("exception", death.report["message"])))
    text = f"rank {death.rank} ended with exit code {death.exitcode} before its work was done, without an error"
    return WorkerFailed(death.rank, "exit", text + _log_tail(death.rank, log_dir))


# Kinds of deaths. An earlier kind is the cause of a later one.
_KILLED, _RAISED, _LEFT_SILENTLY, _LOST_A_PEER = range(4)


def _severity(death: Death) -> tuple[int, float]:
    """Return the key to sort deaths: the kind, then the time of the report, or the rank if there is no report."""
    if death.exitcode < 0 and not death.aborted:
        return _KILLED, death.rank
    if not death.report:
        return _LEFT_SILENTLY, death.rank
    return _LOST_A_PEER if death.lost_a_peer else _RAISED, death.report["timestamp"]


def _signal_text(death: Death) -> str:
    number = -death.exitcode
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "no name"
    text = f"rank {death.rank} was killed by signal {number} ({name})"
    if number == signal.SIGKILL:
        text += (
            ". If nobody killed it, the machine ran out of memory, which `dmesg` or the job's log shows. "
            "Use fewer processes or smaller micro-batches (parallel.chunks). mode=plan estimates each rank's memory"
        )
    return text


def _log_tail(rank: int, log_dir: str | os.PathLike) -> str:
    path = log_path(log_dir, rank)
    # Rank 0 has no log file, because its output is on the console.
    if rank == 0 or not path.is_file():
        return ""
    lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return f"\nThe last lines of {path}:\n" + "\n".join(lines) if lines else ""
