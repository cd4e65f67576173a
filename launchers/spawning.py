"""The state that a process must be in for the moment in which it spawns workers."""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker

from common.machine import changed_environment
from launchers.stopping import SIGNALS


@contextmanager
def spawning(env: Mapping[str, str]) -> Iterator[None]:
    """Children spawned inside see `env` from the start, have SIGINT and the signals of launchers.stopping blocked
    until they can handle them, and do not re-run this script."""
    with ExitStack() as stack:
        # torch's agent sets a worker's environment after it has imported torch: too late for OMP_NUM_THREADS.
        stack.enter_context(changed_environment(env))
        stack.enter_context(_blocked_signals())
        stack.enter_context(_hidden_main())
        yield


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Signals may reach every process of a terminal or a job; a child that is still importing would fall to them.

    Children inherit the blocked signals. Here they are delivered afterwards.
    """
    blocked = {signal.SIGINT, *SIGNALS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        # It unblocks SIGINT and SIGTERM; the tracker, which ignores these two, keeps the others blocked.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _hidden_main() -> Iterator[None]:
    """multiprocessing has each child import the parent's __main__ by its path. Workers need none of it.

    An empty module stands in for it; run_workers refuses beforehand what would need the real one.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
