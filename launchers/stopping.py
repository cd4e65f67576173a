"""The wish to stop: SIGTERM, SIGUSR1 and SIGUSR2 are noted whenever they come, and asked for where a run can end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# sysexits.h: EX_TEMPFAIL. The run has ended early and can go on: "queue me again".
EXIT_CODE = 75
# `timeout` signals a process and then its group: what follows so soon is the same wish, not a second one.
_ONE_WISH_S = 1.0
_ECHO_S = 5.0


class Stopped(KeyboardInterrupt):
    """The run ended early, as it was told to, and can go on from what it has saved.

    A KeyboardInterrupt, so that no `except Exception` on the way up takes a wish to stop for a failed run.
    """


class _Heard:
    """What has come so far; each signal is a number and the monotonic time at which it came."""

    def __init__(self) -> None:
        self.listening = False
        self.first: tuple[int, float] | None = None
        self.second: int | None = None
        self.one_wish_s = _ONE_WISH_S
        self.held = 0
        self.at_once = False
        self.elsewhere: list[Callable[[], bool]] = []


_heard = _Heard()


def install_handlers() -> None:
    """From now on the SIGNALS are noted; a second one ends this process at once, with exit code 128 + its number.

    A thread takes note of them, so that neither a long kernel nor a wait for another rank delays that. Call it in the
    main thread; a signal that was ignored stays ignored.
    """
    if _heard.listening:
        return
    _heard.listening = True
    incoming, outgoing = os.pipe()
    os.set_blocking(outgoing, False)
    signal.set_wakeup_fd(outgoing, warn_on_full_buffer=False)
    for signum in SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _leave_it_to_the_thread)
    threading.Thread(target=_listen, args=(incoming,), name="stop-signals", daemon=True).start()


def heeding() -> bool:
    """Whether this process notes the signals."""
    return _heard.listening


def wanted() -> bool:
    """Whether this process was told to stop. Asked at borders between steps; agree among ranks on it."""
    # A batch script may have blocked a signal from before the first instruction on (see launchers.slurm_worker).
    pending = any(signum in SIGNALS for signum in signal.sigpending())
    return _heard.first is not None or pending or any(asked() for asked in _heard.elsewhere)


def noted() -> int | None:
    """The signal that came first, None where none was delivered."""
    return _heard.first[0] if _heard.first else None


def second_signal() -> int | None:
    """The second signal, where one came while `held`."""
    return _heard.second


def also(asked: Callable[[], bool]) -> None:
    """Have `wanted` ask there too."""
    _heard.elsewhere.append(asked)


def at_once() -> None:
    """From now on the first signal, too, ends this process: there is nothing to save."""
    _heard.at_once = True
    if _heard.first is not None:
        _leave_at_once(_heard.first[0])


def expect_echo() -> None:
    """For ranks whose launcher passes on what it gets: a signal to all arrives twice then, a moment apart."""
    _heard.one_wish_s = _ECHO_S


@contextmanager
def held() -> Iterator[None]:
    """Inside, a second signal is only noted: there are processes to end before this one."""
    _heard.held += 1
    try:
        yield
    finally:
        _heard.held -= 1


def _leave_it_to_the_thread(signum, frame) -> None:
    """Python writes the signal's number to the wake-up pipe before it gets here."""


def _listen(incoming: int) -> None:
    while numbers := os.read(incoming, 64):
        for signum in numbers:
            if signum in SIGNALS:
                _take(signum)


def _take(signum: int) -> None:
    now = time.monotonic()
    if _heard.at_once:
        _leave_at_once(signum)
    if _heard.first is None:
        _heard.first = (signum, now)
    elif now - _heard.first[1] >= _heard.one_wish_s:
        _heard.second = signum
        if not _heard.held:
            _leave_at_once(signum)


def _leave_at_once(signum: int) -> None:
    for child in multiprocessing.active_children():
        child.kill()
    with suppress(Exception):
        print(f"error: stopped by {signal.Signals(signum).name} at once", file=sys.stderr)
        sys.stderr.flush()
    os._exit(128 + signum)
