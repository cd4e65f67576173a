"""Stopping on a signal at a moment of our own choosing."""

from __future__ import annotations

import signal
import threading

from launchers.errors import Interrupted


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP are noted, not acted on; check() raises what was noted.

    A handler that raised at once could do so while a worker is half started, and nobody would know of it to
    end it. A signal that was ignored (nohup, a background job) stays ignored. Outside of the main thread
    nothing is noted: Python delivers signals to the main thread only.
    """

    def __init__(self):
        self._noted: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                previous = signal.getsignal(signum)
                # None: a handler that is not Python's, which could not be put back.
                if previous is not signal.SIG_IGN and previous is not None:
                    self._previous[signum] = previous
                    signal.signal(signum, self._note)
        return self

    def __exit__(self, *exception) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)

    def check(self) -> None:
        """Raises Interrupted when a signal has come since this was entered."""
        if self._noted is not None:
            raise Interrupted(self._noted)

    def _note(self, signum, frame) -> None:
        self._noted = self._noted or signum
