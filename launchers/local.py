"""Starting the ranks of a run on this machine."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from common.errors import LaunchError
from launchers.errors import WorkerFailed
from launchers.failure import log_path
from launchers.signals import StopSignals
from launchers.stopping import Stopped


def run_workers(
    entry: Callable,
    args: tuple,
    processes: int,
    log_dir: str | os.PathLike,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    stoppable: bool = False,
    timeout_s: float | None = None,
    on_restart: Callable[[WorkerFailed], None] | None = None,
) -> None:
    """Runs `entry(world, *args)` in `processes` processes of this machine; returns when all have finished.

    entry: a function at the top level of an importable module (not of the script that runs). args: picklable.
    log_dir: made if missing; ranks other than 0 write stdout and stderr to rank_0001.log, ... there, and
    files that stay empty are removed. Rank 0 keeps this process's console.
    env: more environment variables for the workers, there from their first instruction (OMP_NUM_THREADS).
    max_restarts: how often all workers are started anew after a failure, unless it is an exception with an attribute
    `repeats` that is true. See `restarts` in launchers.world.
    on_restart: told, in this process, of each failure after which that happens.
    stoppable: entry looks at launchers.stopping and raises Stopped: where this process heeds the signals of
    launchers.stopping, the first one is passed on to the workers and not raised.
    timeout_s: how long workers wait for each other, for the message about one that they waited for in vain.

    Workers talk over the loopback interface only and end with this process, however it ends.

    Raises LaunchError before anything starts when entry or args cannot travel; WorkerFailed, with the error
    of the rank that failed first, once all workers are gone; Interrupted (a KeyboardInterrupt), likewise,
    when this process gets SIGINT, SIGHUP or, unless it was passed on, one of launchers.stopping; Stopped (one too)
    when the workers say that they were told to stop.
    """
    if processes < 1:
        raise LaunchError(f"cannot start {processes} processes: a run has at least 1")
    payload = _pack(entry, args)
    log_dir = os.path.abspath(log_dir)
    os.makedirs(log_dir, exist_ok=True)
    with (
        StopSignals(stoppable) as stop,
        _silent("torch.distributed.elastic", "torch.multiprocessing.spawn"),
        tempfile.TemporaryDirectory(prefix="launchers-", ignore_cleanup_errors=True) as private_dir,
    ):
        # Here, since it imports torch: a second in which a signal may already come.
        from launchers.agent import LocalAgent

        if stop.wanted:
            raise Stopped("stopped before the first step")
        agent = LocalAgent(
            payload, processes, log_dir, env or {}, max_restarts, private_dir, stop, stoppable, timeout_s, on_restart
        )
        try:
            agent.run()
            # One that came since the last poll: the caller must not take a wish to stop for a finished run.
            stop.check()
        finally:
            _drop_empty_logs(log_dir, processes)
    if agent.stopped is not None:
        raise Stopped(agent.stopped)
    if agent.failure is not None:
        raise agent.failure


def _pack(entry: Callable, args: tuple) -> bytes:
    where = f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__qualname__', entry)}"
    if where.startswith("__main__."):
        raise LaunchError(f"{where} is in the script itself, which workers do not import: put it in a module")
    try:
        return pickle.dumps((entry, args))
    except Exception as error:
        raise LaunchError(
            f"{where} and its arguments cannot be sent to another process ({error}): "
            "the function must be at the top level of a module, the arguments picklable"
        ) from error


@contextmanager
def _silent(*names: str) -> Iterator[None]:
    """Keeps torch's account of starting and ending workers off the user's console."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.propagate for logger in loggers]
    # Without any handler the logging module would print warnings itself.
    nothing = logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(nothing)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(nothing)


def _drop_empty_logs(log_dir: str, processes: int) -> None:
    for path in (Path(log_path(log_dir, rank)) for rank in range(1, processes)):
        if path.exists() and path.stat().st_size == 0:
            path.unlink()
