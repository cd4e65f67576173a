"""Ending worker processes with all that they started, and leaving with the parent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

_REAPED_S = 5.0
_WATCH_S = 0.5


def lead_group() -> None:
    """Puts this process at the head of a process group of its own, so that what it starts ends with it.

    The terminal's Ctrl-C then reaches the launching process alone, which ends the workers. (Ctrl-Z, too,
    stops only the launching process.)
    """
    os.setpgid(0, 0)


def end_processes(processes: Iterable[BaseProcess]) -> None:
    """Ends `processes` and their process groups by SIGKILL, stopped ones (SIGSTOP) too. All are reaped.

    To a worker SIGTERM means to save and leave, which was asked for before, or is no longer wanted.
    """
    processes = list(processes)
    # Also where the worker itself has gone: what it had started may still be there.
    for process in processes:
        _signal_group(process, signal.SIGKILL)
    for process in processes:
        # SIGKILL cannot be refused; only a process stuck in the kernel (a lost GPU) outlives it, and no wait
        # helps there.
        process.join(_REAPED_S)


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped, as by SIGSTOP or a debugger; False where the system does not say (no /proc)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before it, in parentheses, may hold anything.
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def leave_with_parent(parent_pid: int) -> None:
    """Starts a thread that kills this process and its group, at the latest 0.5 s after `parent_pid` is gone.

    Polls getppid(), which every Unix has. Nobody else is left to tell a process that its parent was killed.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_WATCH_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="leave-with-parent", daemon=True).start()


def _signal_group(process: BaseProcess, signum: int) -> None:
    try:
        os.killpg(process.pid, signum)
    except (ProcessLookupError, PermissionError):
        # No such group (macOS: only dead members): it has ended, or is still too young to lead one.
        if process.is_alive():
            os.kill(process.pid, signum)
