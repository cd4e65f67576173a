"""Requests to stop: handlers note some signals, and a run checks for them at points where it can end.

They are SIGTERM, SIGHUP (the terminal is gone), SIGUSR1 and SIGUSR2.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# sysexits.h: EX_TEMPFAIL. The run has ended early and can go on: "queue me again".
EXIT_CODE = 75
# `timeout` signals a process and then its group, and a launcher passes on what its whole group has received: what
# follows so soon is the same request, not a second one.
SAME_REQUEST_S = 3.0


class Interrupted(KeyboardInterrupt):
    """The launching process was told to stop; its workers are gone.

    A KeyboardInterrupt, so that no `except Exception` on the way up takes a request to stop for a failed run.

    Attributes:
        signum: The signal that came.
        left: What has become of the work, in words.
        exit_code: What a shell expects of a process that this signal has ended.
    """

    def __init__(self, signum: int, left: str = "all workers have ended"):
        super().__init__(signum)
        self.signum = signum
        self.left = left
        self.exit_code = 128 + signum

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signum).name}; {self.left}"


class Stopped(KeyboardInterrupt):
    """The run ended early, as it was told to, and can be continued from its checkpoint.

    A KeyboardInterrupt, so that no `except Exception` on the way up takes a request to stop for a failed run. ``steps``
    is how many steps it has trained and saved.
    """

    def __init__(self, *words: object, steps: int = 0) -> None:
        super().__init__(*words)
        self.steps = steps


@dataclass
class _State:
    """What has come so far: signals by their numbers, and the monotonic time of the first."""

    first: int | None = None
    since: float = 0.0
    second: int | None = None
    waiting: int = 0  # how many StopSignals are entered, which only note a second signal
    at_once: bool = False
    parent: int | None = None


_state = _State()


def install_handlers() -> None:
    """Note the first of the SIGNALS from now on, instead of being ended by it; let the second end this process.

    Call it in the main thread. A signal that was ignored stays ignored.
    """
    for signum in SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _take)


def wanted() -> bool:
    """Return whether this process was told to stop. Ask between steps, and agree on the answer among ranks."""
    # A batch script may have blocked a signal from before the first instruction on (see launchers.slurm.task).
    pending = any(signum in SIGNALS for signum in signal.sigpending())
    return _state.first is not None or pending or _state.parent not in (None, os.getppid())


def noted() -> int | None:
    """Return the signal that came first; None where none was delivered."""
    return _state.first


def second_signal() -> int | None:
    """Return the second signal, where one came while a StopSignals was entered."""
    return _state.second


def stop_without_parent() -> None:
    """Let `wanted` return true once the parent process is gone: nobody else would tell this one to stop."""
    _state.parent = os.getppid()


def at_once() -> None:
    """Let even the first signal end this process from now on: there is nothing to save."""
    _state.at_once = True
    if _state.first is not None:
        _leave_at_once(_state.first)


class StopSignals:
    """While entered, SIGINT is noted, as the SIGNALS are after `install_handlers`; `check` raises what was noted.

    A handler that raised at once could do so while a worker is half started, and nobody would know of it to end it. A
    second signal is only noted, too: there are processes to end before this one. Outside of the main thread SIGINT is
    not noted: Python delivers signals to that one only.

    Args:
        stoppable: Whether what runs inside can stop by itself. Then the first of the SIGNALS is `wanted`, not raised,
            for the caller to pass on.
    """

    def __init__(self, stoppable: bool = False) -> None:
        self._stoppable = stoppable
        self._interrupted: int | None = None
        self._undo = ExitStack()

    def __enter__(self) -> StopSignals:
        _state.waiting += 1
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and previous is not signal.SIG_IGN:
            self._undo.callback(signal.signal, signal.SIGINT, previous)
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception) -> None:
        _state.waiting -= 1
        self._undo.close()

    @property
    def wanted(self) -> bool:
        """Whether what runs inside should end by itself."""
        return self._stoppable and wanted()

    def check(self) -> None:
        """Raise Interrupted when a signal has come since this was entered."""
        signum = self._interrupted or second_signal() or (None if self._stoppable else noted())
        if signum is not None:
            raise Interrupted(signum)

    def _note(self, signum, frame) -> None:
        self._interrupted = signum


def _take(signum, frame) -> None:
    now = time.monotonic()
    if _state.at_once:
        _leave_at_once(signum)
    if _state.first is None:
        _state.first, _state.since = signum, now
    elif signum != signal.SIGHUP and now - _state.since >= SAME_REQUEST_S:  # a lost terminal asks no one
        _state.second = signum
        if not _state.waiting:
            _leave_at_once(signum)


def _leave_at_once(signum: int) -> None:
    for child in multiprocessing.active_children():
        child.kill()
    with suppress(Exception):
        print(f"error: stopped by {signal.Signals(signum).name} at once", file=sys.stderr)
        sys.stderr.flush()
    os._exit(128 + signum)
