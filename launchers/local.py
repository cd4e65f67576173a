"""Starts the ranks of a run on this machine and watches them until they have ended."""

from __future__ import annotations

import atexit
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from common.errors import LaunchError
from common.files import write_atomically
from common.machine import changed_environment
from launchers.failure import Death, WorkerFailed, read_report, remove_empty_log, root_cause
from launchers.heartbeat import GIVE_UP_LATE_S, describe_stall, read_notes
from launchers.meeting import local_store
from launchers.stopping import SIGNALS, Interrupted, Stopped, StopSignals
from launchers.worker import Console, Job, redirect_output, work
from launchers.world import World

_POLL_S = 0.05
_early: dict[str, str] | None = None  # the environment of a fork server that was started early
_PRELOAD = ("torch", "torch.distributed")
_END_S = 5.0
# All ranks of a run that was asked to stop end within moments of each other.
_LEAVE_S = 10.0
_private_folder = partial(tempfile.TemporaryDirectory, prefix="launchers-", ignore_cleanup_errors=True)


def start_fork_server(preload: Sequence[str] = (), early: bool = False) -> None:
    """Start the process that forks workers. It imports the modules ``preload`` and torch while the caller continues.

    This is the fork server of the standard library. A process has only one, so a second call does nothing. It imports
    libraries with the environment at its start. The modules must start no thread and use no device. If it is started
    ``early``, before the configuration is known, a call with another environment starts it again.
    """
    global _early
    environment = dict(os.environ)
    if _early != environment:
        _end_early()
    _early = None
    resource_tracker.ensure_running()  # first, because it unblocks signals
    # Signals may be sent to all processes of a terminal or a job. A worker unblocks them when it can handle them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *SIGNALS})
    try:
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        # SAFEPATH: the working directory does not come first. It may have a package "training", too.
        with changed_environment({"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}), _without_main():
            multiprocessing.set_forkserver_preload([*preload, *_PRELOAD])
            forkserver.ensure_running()
            _early = environment if early else None
    except OSError as error:
        if "too long" not in str(error):
            raise
        raise LaunchError(
            f"the path of the folder for temporary files, {tempfile.gettempdir()}, is too long for the socket at which "
            "workers are forked; set TMPDIR to a folder with a shorter path, such as /tmp"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@atexit.register
def _end_early() -> None:
    """End a fork server that no run uses. It may import for seconds, and has this process's console."""
    if _early is not None:
        server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]  # tried with Python 3.11
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def run_workers(
    entry: Callable,
    args: tuple,
    processes: int,
    log_dir: str | os.PathLike,
    max_restarts: int = 0,
    stoppable: bool = False,
    timeout_s: float = float("inf"),
) -> None:
    """Run ``entry(world, *args)`` in ``processes`` processes of this machine; return when all have finished.

    Workers have the environment of this process, meet in a private folder, and communicate over the loopback interface
    only. They end with this process, however it ends.

    Args:
        entry: A function at the top level of an importable module (not of the script that runs).
        args: Its picklable arguments.
        processes: The number of ranks.
        log_dir: A folder, created if it is missing. Ranks other than 0 write stdout and stderr to rank_0001.log, ...
            there; files that stay empty are removed. Rank 0 keeps this process's console.
        max_restarts: How often all workers are restarted after a failure. The failure is printed. An exception with a
            true attribute `repeats` ends the run. See `launchers.world.restarts`.
        stoppable: Whether entry checks launchers.stopping and raises Stopped. If so, and if this process handles the
            signals of launchers.stopping, the first signal is passed on to the workers and not raised.
        timeout_s: Seconds that workers wait for each other, for the message about a worker that does not move.

    Raises:
        LaunchError: If the workers cannot be forked.
        WorkerFailed: If a worker has failed. This is the error of the rank that failed first; all workers have ended.
        Interrupted: If this process has received SIGINT, a signal of launchers.stopping that it did not pass on, or a
            second signal, or if a signal has ended a worker that is not stoppable. All workers have ended. This is a
            KeyboardInterrupt.
        Stopped: If the workers have stopped on request. This is a KeyboardInterrupt, too.
    """
    with StopSignals(stoppable) as stop:
        start_fork_server([entry.__module__])
        if stop.wanted:
            raise Stopped("stopped before the first step")
        for restarts in itertools.count():
            with _private_folder() as folder:
                job = Job(processes, folder, os.path.abspath(log_dir), dict(os.environ), restarts, stoppable)
                with _Workers(job, entry, args, stop, timeout_s).running() as workers:
                    failure, may_restart = workers.watch()
            # After a signal since the last poll, the caller must not treat a request to stop as a finished run.
            stop.check()
            if failure is None:
                return
            if restarts == max_restarts or not may_restart:
                raise failure
            again = f"restart {restarts + 1} of {max_restarts} (launcher.max_restarts)"
            print(f"{failure}\n{again}", file=sys.stderr, flush=True)


def call_in_workers(
    function: Callable,
    args: tuple,
    processes: int,
    log_dir: str | os.PathLike | None = None,
    timeout_s: float = float("inf"),
) -> list[Any]:
    """Call ``function(world, *args)`` in new processes of this machine; return its result on each rank.

    The ranks print nothing. None of their state stays in this process, such as a model or a context on a GPU. See
    ``WorkerPool`` for the arguments and the errors.
    """
    with closing(WorkerPool(processes, log_dir, timeout_s)) as pool:
        return pool.call(function, args)


class WorkerPool:
    """Processes of this machine that call one function after the other. The first call after a failure starts them.

    Attributes:
        processes: The number of ranks.
        calls: The number of calls that the current processes have begun.
    """

    def __init__(self, processes: int, log_dir: str | os.PathLike | None = None, timeout_s: float = float("inf")):
        """Set up a pool; no process is started.

        Args:
            processes: The number of ranks.
            log_dir: The folder for the output of the ranks; None to discard it.
            timeout_s: Seconds that workers wait for each other.
        """
        self.processes, self.calls = processes, 0
        self._log_dir, self._timeout_s = log_dir, timeout_s
        self._workers: _Workers | None = None
        self._open = ExitStack()

    def call(self, function: Callable, args: tuple) -> list[Any]:
        """Call ``function(world, *args)`` on each rank; return its results.

        Args:
            function: A function at the top level of an importable module. Its result must be picklable.
            args: Its picklable arguments.

        Raises:
            WorkerFailed: See ``run_workers``, which also lists further errors.
        """
        with StopSignals() as stop:
            try:
                workers = self._workers = self._workers or self._started(stop, function)
                workers.stop = stop
                self.calls += 1
                call = Path(self._folder, f"call_{self.calls}")
                results = [call.with_suffix(f".{rank}") for rank in range(self.processes)]
                write_atomically(call, pickle.dumps((function, args)))
                failure, _ = workers.watch(lambda: all(result.exists() for result in results))
                stop.check()
                if failure is not None:
                    raise failure
                call.unlink()  # it may have a whole data set
                return [pickle.loads(result.read_bytes()) for result in results]
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the processes. The next call starts new ones."""
        self._workers, self.calls = None, 0
        self._open.close()

    def _started(self, stop: StopSignals, function: Callable) -> _Workers:
        start_fork_server([function.__module__])
        self._folder = self._open.enter_context(_private_folder())
        logs = os.path.abspath(self._log_dir or os.path.join(self._folder, "logs"))
        job = Job(self.processes, self._folder, logs, dict(os.environ))
        workers = _Workers(job, _serve, (self._folder, logs), stop, self._timeout_s)
        return self._open.enter_context(workers.running())


def _serve(world: World, folder: str, logs: str) -> None:
    """Answer the calls of a pool, until it ends this process."""
    if world.rank == 0:
        redirect_output(logs, 0)
    for number in itertools.count(1):
        call = Path(folder, f"call_{number}")
        while not call.exists():
            time.sleep(_POLL_S)
        function, args = pickle.loads(call.read_bytes())
        write_atomically(call.with_suffix(f".{world.rank}"), pickle.dumps(function(world, *args)))
        del function, args
        gc.collect()  # models have cycles


class _Workers:
    """The workers of one start. Between polls they are stopped if ``stop`` requests it."""

    def __init__(self, job: Job, entry: Callable, args: tuple, stop: StopSignals, timeout_s: float) -> None:
        self._job, self.stop, self._timeout_s = job, stop, timeout_s
        process = multiprocessing.get_context("forkserver").Process
        ranks = range(job.processes)
        self._processes = [process(target=work, args=(Console(), job, rank, entry, args)) for rank in ranks]
        self._asked_to_stop = False
        self._ended: dict[int, Death] = {}

    def watch(self, finished: Callable[[], bool] | None = None) -> tuple[WorkerFailed | None, bool]:
        """Wait until all workers have finished or one has failed, or until ``finished``.

        Returns:
            The first failure, or None; and whether another start may succeed.

        Raises:
            Stopped: If the workers have stopped on request.
            Interrupted: If this process, or a worker that cannot stop by itself, was asked to stop at once.
        """
        # A worker that has ended without finishing has failed or was asked to stop, whatever its exit code.
        while not (deaths := self._failed()):
            if len(self._ended) == self._job.processes or (finished is not None and finished()):
                return None, False
            self._poll()
            if self.stop.wanted and not self._asked_to_stop:
                self._asked_to_stop = True
                for process in self._processes:
                    process.terminate()
        if stopped := [death.report["stopped"] for death in deaths if death.report.get("stopped") is not None]:
            deadline = time.monotonic() + _LEAVE_S
            while len(self._ended) < self._job.processes and time.monotonic() < deadline:
                self._poll()
            raise Stopped(stopped[0])
        signum = next((-death.exitcode for death in deaths if -death.exitcode in SIGNALS), None)
        if signum is not None and not self._job.stoppable:
            raise Interrupted(signum)
        # The cause is determined before the other workers are ended, so that their deaths are not mistaken for it.
        stall = None
        if all(death.aborted for death in deaths):
            stall = self._stall()
            deaths = self._failed()
        may_restart = not self.stop.wanted and not any(death.report.get("repeats") for death in deaths)
        return stall or root_cause(deaths, self._job.log_dir), may_restart

    @contextmanager
    def running(self) -> Iterator[_Workers]:
        """Start the workers. At the end, end them and remove the logs that stayed empty."""
        try:
            self._start()
            yield self
        finally:
            self._end()
            for rank in range(self._job.processes):
                remove_empty_log(self._job.log_dir, rank)

    def _end(self) -> None:
        """End all workers, and the processes that they have started, by SIGKILL; wait until they have ended."""
        started = [(process, process.pid) for process in self._processes if process.pid is not None]
        for process, pid in started:
            # Children of an ended worker may still run. If none does, macOS denies permission.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            process.kill()  # it may not lead its group yet
        # Only a process that is stuck in the kernel (a lost GPU) survives SIGKILL. Waiting longer does not help.
        deadline = time.monotonic() + _END_S
        for process, _ in started:
            process.join(max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:
        """Fork the workers, as soon as the fork server has imported its modules."""
        try:
            with _without_main():
                for process in self._processes:
                    process.start()
        except (EOFError, OSError) as error:  # the server has ended, and its error is on the console
            raise LaunchError(f"workers cannot be forked: {error!r}") from error

    def _stall(self) -> WorkerFailed | None:
        """Return an error that names the ranks that have not moved for as long as NCCL's watchdog waits.

        The watchdog has ended the ranks that waited for them. None if there are no such ranks: then a rank has ended
        for another reason.
        """
        deadline = time.monotonic() + GIVE_UP_LATE_S  # NCCL's watchdogs do not end ranks at the same time
        while True:
            running = [rank for rank in range(self._job.processes) if rank not in self._ended]
            notes = read_notes(local_store(self._job.store_path), running).items()
            silent = {rank: at for rank, at in notes if at.silent_s > 0.9 * self._timeout_s and not at.left}
            if len(silent) < 2 or time.monotonic() > deadline:
                break
            self._poll()
        ranks = range(self._job.processes)
        text = describe_stall(silent, [f"rank {rank}" for rank in ranks], self._timeout_s)
        return WorkerFailed(min(silent), "stall", text) if silent else None

    def _failed(self) -> list[Death]:
        return [death for death in self._ended.values() if not death.finished]

    def _poll(self) -> None:
        self.stop.check()
        wait([process.sentinel for rank, process in enumerate(self._processes) if rank not in self._ended], _POLL_S)
        for rank, process in enumerate(self._processes):
            if rank not in self._ended and (code := process.exitcode) is not None:
                report = read_report(self._job.report_path(rank))
                self._ended[rank] = Death(rank, code, report or {}, finished=report == {})


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the script or notebook: each process of multiprocessing would import it and so run it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
