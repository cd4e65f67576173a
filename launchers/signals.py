"""Stopping a launching process on a signal at a moment of our own choosing."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack

from launchers import stopping
from launchers.errors import Interrupted


class StopSignals:
    """While entered, SIGINT, SIGHUP and those of launchers.stopping are noted, not acted on.

    check() raises what was noted. Where the work inside can stop by itself (`stoppable`), the first SIGTERM, SIGUSR1
    or SIGUSR2 is no reason to raise: it is `wanted` then, for the caller to pass on. In a process that does not
    `heed()` them, SIGTERM is one like SIGINT, and the other two are not noted.

    A handler that raised at once could do so while a worker is half started, and nobody would know of it to
    end it. A signal that was ignored (nohup, a background job) stays ignored. Outside of the main thread
    nothing is noted: Python delivers signals to the main thread only.
    """

    def __init__(self, stoppable: bool = False):
        self._stoppable = stoppable
        self._noted: int | None = None
        self._previous: dict[int, object] = {}
        self._holding = ExitStack()

    def __enter__(self) -> StopSignals:
        own = [signal.SIGINT, signal.SIGHUP]
        if stopping.heeding():
            self._holding.enter_context(stopping.held())
        else:
            own.append(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread():
            for signum in own:
                previous = signal.getsignal(signum)
                # None: a handler that is not Python's, which could not be put back.
                if previous is not signal.SIG_IGN and previous is not None:
                    self._previous[signum] = previous
                    signal.signal(signum, self._note)
        return self

    def __exit__(self, *exception) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)
        self._holding.close()

    @property
    def wanted(self) -> bool:
        """Whether the work inside should end by itself."""
        return self._stoppable and stopping.wanted()

    def check(self) -> None:
        """Raises Interrupted when a signal has come since this was entered."""
        signum = self._noted or stopping.second_signal() or (None if self._stoppable else stopping.noted())
        if signum is not None:
            raise Interrupted(signum)

    def _note(self, signum, frame) -> None:
        self._noted = self._noted or signum
