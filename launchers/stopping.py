"""Requests to stop: handlers note some signals, and a run checks for them where it can end.

The signals are SIGTERM, SIGHUP (the terminal was closed), SIGUSR1 and SIGUSR2.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# EX_TEMPFAIL of sysexits.h: the run has ended early and can be continued, so a queue may start it again.
EXIT_CODE = 75
# `timeout` signals a process and then its group, and a launcher passes on a signal that its whole group has received.
# A signal within this time is therefore the same request, not a second one.
SAME_REQUEST_S = 3.0


class Interrupted(KeyboardInterrupt):
    """The launching process was asked to stop and has ended its workers.

    This is a KeyboardInterrupt, so that no `except Exception` of a caller treats a request to stop as a failed run.

    Attributes:
        signum: The received signal.
        left: The state of the workers or jobs, in words.
        exit_code: 128 + signum, as shells expect after a signal; 1 for SIGINT.
    """

    def __init__(self, signum: int, left: str = "all workers have ended"):
        super().__init__(signum)
        self.signum = signum
        self.left = left
        self.exit_code = 128 + signum if signum in SIGNALS else 1

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signum).name}; {self.left}"


class Stopped(KeyboardInterrupt):
    """The run ended early, on request, and can be continued from its checkpoint.

    This is a KeyboardInterrupt, so that no `except Exception` of a caller treats a request to stop as a failed run.
    ``steps`` is the number of steps that the run has trained and saved.
    """

    def __init__(self, *words: object, steps: int = 0) -> None:
        super().__init__(*words)
        self.steps = steps


@dataclass
class _State:
    """The numbers of the first and the second received signal, and the monotonic time of the first."""

    first: int | None = None
    since: float = 0.0
    second: int | None = None
    waiting: int = 0  # the number of entered StopSignals; while there are some, a second signal is only noted
    at_once: bool = False
    parent: int | None = None


_state = _State()


def install_handlers() -> list[signal.Signals]:
    """From now on, note the first of the SIGNALS instead of ending, and end this process at the second.

    Call this in the main thread. It returns the signals that it handles: those that would have ended this process. A
    signal that is ignored, or that a program handles, stays so.
    """
    taken = [signum for signum in SIGNALS if signal.getsignal(signum) is signal.SIG_DFL]
    for signum in taken:
        signal.signal(signum, _take)
    return taken


@contextmanager
def handled() -> Iterator[None]:
    """In the block, note signals as after ``install_handlers``. This has no effect outside of the main thread."""
    taken = install_handlers() if threading.current_thread() is threading.main_thread() else []
    try:
        yield
    finally:
        for signum in taken:
            signal.signal(signum, signal.SIG_DFL)
        if taken:
            _state.first = _state.second = None


def ignore() -> None:
    """Ignore the SIGNALS at the end of a program: they would end Python while it exits."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def wanted() -> bool:
    """Return whether this process was asked to stop. Ranks call this between steps and agree on the answer."""
    # A batch script may have blocked a signal before this process started (see launchers.slurm.task).
    pending = any(signum in SIGNALS for signum in signal.sigpending())
    return _state.first is not None or pending or _state.parent not in (None, os.getppid())


def noted() -> int | None:
    """Return the first signal; None if no signal was delivered."""
    return _state.first


def second_signal() -> int | None:
    """Return the second signal, if it was received while a StopSignals was entered."""
    return _state.second


def stop_without_parent() -> None:
    """Let `wanted` return true after the parent process has ended: no other process would stop this one."""
    _state.parent = os.getppid()


def at_once() -> None:
    """From now on, end this process at the first signal. Call this if there is no work to save."""
    _state.at_once = True
    if _state.first is not None:
        _leave_at_once(_state.first)


class StopSignals:
    """While entered, SIGINT is noted, as the SIGNALS are after `install_handlers`; `check` raises a noted signal.

    A handler that raises at once could leave a half-started worker, which nothing would end. A second signal is only
    noted, too, because other processes must end before this one. SIGINT is noted in the main thread only, to which
    Python delivers signals.

    Args:
        stoppable: Whether the code inside can stop by itself. If so, the first of the SIGNALS is not raised: `wanted`
            returns true, and the caller passes the signal on.
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
        """Whether the code inside should end by itself."""
        return self._stoppable and wanted()

    def check(self) -> None:
        """Raise Interrupted if a signal was received since the block began."""
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
    elif signum != signal.SIGHUP and now - _state.since >= SAME_REQUEST_S:  # a closed terminal is no request
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
