"""Requests to stop: some signals are noted when they come, and a run asks for them where it can end.

They are SIGTERM, SIGHUP (the terminal is gone), SIGUSR1 and SIGUSR2.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# sysexits.h: EX_TEMPFAIL. The run has ended early and can go on: "queue me again".
EXIT_CODE = 75
# `timeout` signals a process and then its group: what follows so soon is the same request, not a second one.
_SAME_REQUEST_S = 1.0
_ECHO_S = 5.0


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
    """The run ended early, as it was told to, and can go on from what it has saved.

    A KeyboardInterrupt, so that no `except Exception` on the way up takes a request to stop for a failed run. ``steps``
    is how many steps it has trained and saved.
    """

    def __init__(self, *words: object, steps: int = 0) -> None:
        super().__init__(*words)
        self.steps = steps


@dataclass
class _State:
    """What has come so far; each signal is a number and the monotonic time at which it came."""

    listening: bool = False
    first: tuple[int, float] | None = None
    second: int | None = None
    same_request_s: float = _SAME_REQUEST_S
    waiting: int = 0  # how many StopSignals are entered, which only note a second signal
    at_once: bool = False
    others: list[Callable[[], bool]] = field(default_factory=list)


_state = _State()


def install_handlers() -> None:
    """Note the SIGNALS from now on; a second one ends this process at once, with exit code 128 + its number.

    A thread takes note of them, so that neither a long kernel nor a wait for another rank delays that. Call it in the
    main thread. A signal that was ignored stays ignored.
    """
    if _state.listening:
        return
    _state.listening = True
    incoming, outgoing = os.pipe()
    os.set_blocking(outgoing, False)
    signal.set_wakeup_fd(outgoing, warn_on_full_buffer=False)
    for signum in SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _leave_it_to_the_thread)
    try:
        threading.Thread(target=_listen, args=(incoming,), name="stop-signals", daemon=True).start()
    except RuntimeError as error:
        print(f"error: {error}: this user may have no more of them. Allow more: ulimit -u 4096", file=sys.stderr)
        raise SystemExit(1) from None


def wanted() -> bool:
    """Return whether this process was told to stop. Ask between steps, and agree on the answer among ranks."""
    # A batch script may have blocked a signal from before the first instruction on (see launchers.slurm.task).
    pending = any(signum in SIGNALS for signum in signal.sigpending())
    return _state.first is not None or pending or any(asked() for asked in _state.others)


def noted() -> int | None:
    """Return the signal that came first; None where none was delivered."""
    return _state.first[0] if _state.first else None


def second_signal() -> int | None:
    """Return the second signal, where one came while a StopSignals was entered."""
    return _state.second


def stop_without_parent() -> None:
    """Let `wanted` return true once the parent process is gone: nobody else would tell this one to stop."""
    parent = os.getppid()
    also(lambda: os.getppid() != parent)


def also(asked: Callable[[], bool]) -> None:
    """Let `wanted` ask the function `asked` too."""
    _state.others.append(asked)


def at_once() -> None:
    """Let even the first signal end this process from now on: there is nothing to save."""
    _state.at_once = True
    if _state.first is not None:
        _leave_at_once(_state.first[0])


def expect_echo() -> None:
    """Take a signal that soon follows for the same request: a launcher passes on what its whole group has received."""
    _state.same_request_s = _ECHO_S


class StopSignals:
    """While entered, SIGINT and the SIGNALS are noted, and `check` raises what was noted.

    A handler that raised at once could do so while a worker is half started, and nobody would know of it to end it. A
    second signal is only noted, too: there are processes to end before this one. A signal that was ignored (nohup, a
    background job) stays ignored. In a process without `install_handlers`, SIGTERM and SIGHUP are treated like SIGINT,
    and SIGUSR1 and SIGUSR2 are not noted. Outside of the main thread nothing is noted: Python delivers signals to that
    one only.

    Args:
        stoppable: Whether what runs inside can stop by itself. Then the first of the SIGNALS is `wanted`, not raised,
            for the caller to pass on.
    """

    def __init__(self, stoppable: bool = False) -> None:
        self._stoppable = stoppable
        self._noted: int | None = None
        self._undo = ExitStack()

    def __enter__(self) -> StopSignals:
        own = [signal.SIGINT]
        if _state.listening:
            _state.waiting += 1
            self._undo.callback(_stop_waiting)
        else:
            own += [signal.SIGTERM, signal.SIGHUP]
        if threading.current_thread() is threading.main_thread():
            for signum in own:
                previous = signal.getsignal(signum)
                # None: a handler that is not Python's, which could not be put back.
                if previous is not signal.SIG_IGN and previous is not None:
                    self._undo.callback(signal.signal, signum, previous)
                    signal.signal(signum, self._note)
        return self

    def __exit__(self, *exception) -> None:
        self._undo.close()

    @property
    def wanted(self) -> bool:
        """Whether what runs inside should end by itself."""
        return self._stoppable and wanted()

    def check(self) -> None:
        """Raise Interrupted when a signal has come since this was entered."""
        signum = self._noted or second_signal() or (None if self._stoppable else noted())
        if signum is not None:
            raise Interrupted(signum)

    def _note(self, signum, frame) -> None:
        self._noted = self._noted or signum


def _stop_waiting() -> None:
    _state.waiting -= 1


def _leave_it_to_the_thread(signum, frame) -> None:
    """Do nothing: Python has written the signal's number to the wake-up pipe."""


def _listen(incoming: int) -> None:
    while numbers := os.read(incoming, 64):
        for signum in numbers:
            if signum in SIGNALS:
                _take(signum)


def _take(signum: int) -> None:
    now = time.monotonic()
    if _state.at_once:
        _leave_at_once(signum)
    if _state.first is None:
        _state.first = (signum, now)
    elif signum != signal.SIGHUP and now - _state.first[1] >= _state.same_request_s:  # a lost terminal asks no one
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
