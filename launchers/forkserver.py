"""A process that imports what workers need once and forks each worker from there.

The server has no threads and touches no device, so that a fork of it is a sound process. It leads a process group of
its own, and so does each worker: a terminal's Ctrl-C reaches the launching process alone.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from common.console import unfailing_output
from common.errors import LaunchError
from launchers.stopping import SIGNALS
from launchers.worker import Job, work

_POLL_S = 0.05
_REAPED_S = 5.0
_PRELOAD = ("torch", "torch.distributed")


class ForkServer:
    """The launching process's side: starts the server at once, has it fork workers, and learns how they end.

    Use it as a context manager: at the end of the block the server and all workers are gone. They also end with the
    launching process, however it ends.

    Attributes:
        pids: The workers' process ids by rank; empty until they are forked.
        exitcodes: Of the workers that have ended, by rank: -N for signal N.
    """

    def __init__(self, env: Mapping[str, str] | None = None, preload: Sequence[str] = ()) -> None:
        """Starts the server, which imports its modules while the caller goes on.

        Args:
            env: Environment variables for the server and its workers, set before anything is imported.
            preload: Modules to import beside torch. They must start no thread and touch no device. One that cannot be
                imported is left out: the worker that needs it raises the error.
        """
        self.pids: list[int] = []
        self.exitcodes: dict[int, int] = {}
        self._forking = False
        self._connection, theirs = Pipe()
        # Only this process holds the writing end, so workers read the end of the file when it is gone.
        alive, self._alive = os.pipe()
        with _blocked_signals():
            self._process = self._spawn((theirs.fileno(), alive), env or {}, [*_PRELOAD, *preload])
        theirs.close()
        os.close(alive)

    def _spawn(self, fds: tuple[int, int], env: Mapping[str, str], preload: Sequence[str]) -> subprocess.Popen:
        """Starts a process that runs ``serve(*fds, preload)``."""
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from launchers.forkserver import serve; "
            f"serve({fds[0]}, {fds[1]}, {preload!r})"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, **env}, stdin=subprocess.DEVNULL, pass_fds=fds
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def start(self, job: Job) -> None:
        """Has the server fork `job.processes` workers, as soon as it has imported its modules.

        Args:
            job: What they run.
        """
        self.pids, self.exitcodes, self._forking = [], {}, True
        try:
            self._connection.send(job)
        except OSError:
            raise self._gone() from None

    def poll(self, timeout_s: float) -> None:
        """Updates `pids` and `exitcodes`; waits at most `timeout_s` seconds for news.

        Raises:
            LaunchError: The server has ended.
        """
        try:
            while self._connection.poll(timeout_s):
                news = self._connection.recv()
                if isinstance(news, list):
                    self.pids, self._forking = news, False
                elif news[0] in self.pids:  # else of an earlier job
                    self.exitcodes[self.pids.index(news[0])] = news[1]
                timeout_s = 0
        except (EOFError, OSError):
            raise self._gone() from None

    def end_workers(self) -> None:
        """Ends all workers and what they have started, by SIGKILL, and waits until they are gone."""
        if self._forking:  # their ids are not known yet, but they end with the server
            self.close()
            return
        kill_groups(self.pids)
        # SIGKILL cannot be refused: only a process stuck in the kernel (a lost GPU) outlives it, and no wait helps.
        deadline = time.monotonic() + _REAPED_S
        with suppress(LaunchError):
            while len(self.exitcodes) < len(self.pids) and time.monotonic() < deadline:
                self.poll(_POLL_S)
        self.pids = []

    def close(self) -> None:
        """Ends the workers and the server. A second call does nothing."""
        if self._connection.closed:
            return
        self._forking = False
        self.end_workers()
        self._process.kill()
        self._process.wait()
        self._connection.close()
        os.close(self._alive)

    def _gone(self) -> LaunchError:
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"left with exit code {code}"
        return LaunchError(f"process {self._process.pid}, which forks the workers, {how}; start the run again")


def kill_groups(pids: Iterable[int]) -> None:
    """Ends the process groups that `pids` lead, stopped processes (SIGSTOP) too."""
    for pid in pids:
        # Also where the worker itself has gone: what it had started may still run. macOS refuses a group of the dead.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def serve(connection_fd: int, alive_fd: int, preload: Sequence[str]) -> None:
    """The server's whole life; in a worker forked from it, the worker's.

    Args:
        connection_fd: Where jobs come from and news of the workers goes.
        alive_fd: Reads the end of the file once the launching process is gone.
        preload: Modules to import.
    """
    os.setpgid(0, 0)
    gc.disable()  # imports are a tenth faster without
    for name in preload:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # so that workers' collections neither look at nor copy what they share
    forked = _fork_workers(Connection(connection_fd))
    if forked is not None:
        gc.enable()
        with unfailing_output():
            work(*forked, alive_fd)


def _fork_workers(connection: Connection) -> tuple[Job, int] | None:
    """Forks workers for each job that comes, until the launcher is gone.

    Returns:
        The job and the rank, in a worker; None in the server.
    """
    pids: list[int] = []
    try:
        while True:
            if connection.poll(_POLL_S):
                job = connection.recv()
                pids.clear()
                for rank in range(job.processes):
                    pid = os.fork()
                    if pid == 0:
                        connection.close()
                        pids.clear()  # the others are not this worker's to end
                        return job, rank
                    with suppress(OSError):  # the worker does so too, and may have ended
                        os.setpgid(pid, pid)
                    pids.append(pid)
                connection.send(pids)
            for ended in _reap():
                connection.send(ended)
    except (EOFError, ConnectionError):
        return None
    finally:
        kill_groups(pids)


def _reap() -> Iterator[tuple[int, int]]:
    """Yields process id and exit code of each worker that has ended since the last call."""
    with suppress(ChildProcessError):  # there is no worker
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Has a child inherit SIGINT and the stop signals as blocked: they may reach all processes of a terminal or a job.

    The server keeps them blocked; a worker unblocks them once it can handle them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
