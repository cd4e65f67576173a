"""Ending worker processes with all that they started, and leaving with the parent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

# Seconds between SIGTERM and SIGKILL: enough for a handler to write a line, short enough to be called "at
# once".
GRACE_S = 5.0
_WATCH_S = 0.5


def lead_group() -> None:
    """Puts this process at the head of a process group of its own, so that what it starts ends with it.

    The terminal's Ctrl-C then reaches the launching process alone, which ends the workers. (Ctrl-Z, too,
    stops only the launching process.)
    """
    os.setpgid(0, 0)


def end_processes(processes: Iterable[BaseProcess], grace_s: float = GRACE_S) -> None:
    """Ends `processes` and their process groups: SIGTERM, after `grace_s` seconds SIGKILL. All are reaped."""
    processes = list(processes)
    for process in processes:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    # Also where the worker itself has gone: what it had started may not have listened.
    for process in processes:
        _signal_group(process, signal.SIGKILL)
    for process in processes:
        # SIGKILL cannot be refused; only a process stuck in the kernel (a lost GPU) outlives it, and no wait
        # helps there.
        process.join(grace_s)


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
