"""A worker of run_workers: a process that calls the user's function and reports how it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import NoReturn

from common.machine import unfailing_output
from launchers import stopping
from launchers.failure import log_path, write_report
from launchers.meeting import use_loopback
from launchers.world import LOCAL_ROLE, STORE_FILE, World

_PEER_DELAY_S = 2.5  # a rank that lost a connection ends so much later than the rank that broke it


@dataclass(frozen=True)
class Job:
    """The common part of the work of all workers of one start.

    Attributes:
        processes: Number of workers.
        folder: A private folder of this start, with the workers' store and error reports.
        log_dir: The folder for the output of ranks other than 0.
        environment: The launching process's environment variables.
        restarts: How often the workers of this run were started before.
        stoppable: Whether entry checks launchers.stopping between its steps.
    """

    processes: int
    folder: str
    log_dir: str
    environment: Mapping[str, str]
    restarts: int = 0
    stoppable: bool = False

    @property
    def store_path(self) -> Path:
        """The file in which the workers meet."""
        return Path(self.folder) / "store"

    def report_path(self, rank: int) -> Path:
        """The file for the report on how a rank has ended."""
        return Path(self.folder) / f"report_{rank}.json"

    def environment_of(self, rank: int) -> dict[str, str]:
        """Return a worker's environment variables: the launching process's, and its rank under torchrun's names."""
        return {
            **self.environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.processes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "ROLE_NAME": LOCAL_ROLE,
            STORE_FILE: str(self.store_path),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": self.environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }


class Console:
    """The launching process's standard output and error, which may differ from those of the fork server."""

    def __reduce__(self) -> tuple:
        return _take_console, (DupFd(1), DupFd(2))


def _take_console(*passed) -> None:
    for descriptor, source in enumerate(passed, start=1):
        os.dup2(source.detach(), descriptor)


@unfailing_output()
def work(_console: None, job: Job, rank: int, entry: Callable, args: tuple) -> NoReturn:
    """Call ``entry(world, *args)`` as `rank`, in a process that was forked for it, and end without any clean-up.

    Unpickling the console takes it over. The exit code is 1 after an exception, which is written to the report of the
    rank, and launchers.stopping.EXIT_CODE after a Stopped.
    """
    # Processes that the worker starts are in its group and end with it.
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    threading.Thread(target=_leave_with_launcher, name="leave-with-launcher", daemon=True).start()
    # The processes that read data start by the default of the platform again, not from the fork server.
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()  # the fork server has the variables of its own start
    os.environ.update(job.environment_of(rank))
    world = World.detect()
    if job.stoppable:
        stopping.install_handlers()
    # The launching process handles Ctrl-C. All signals were blocked before the fork server was started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *stopping.SIGNALS})
    if rank > 0:
        redirect_output(job.log_dir, rank)
    report = job.report_path(rank)
    try:
        use_loopback()
        entry(world, *args)
    except stopping.Stopped as stopped:
        write_report(report, stopped)
        _leave(stopping.EXIT_CODE)
    except BaseException as error:
        fail(error, report, shown=rank > 0)  # the launching process shows rank 0's, on the same console
    report.touch()
    _leave(0)  # remaining threads or process groups must not delay the end


def redirect_output(log_dir: str | os.PathLike, rank: int) -> None:
    """Send file descriptors 1 and 2 to the log of the rank: native code and child processes do not use sys.stdout."""
    os.makedirs(log_dir, exist_ok=True)
    log = os.open(log_path(log_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Each line is written at once, so that the file shows how far a killed process came.
    for stream in (sys.stdout, sys.stderr):  # declared as TextIO, which lacks a method that the actual classes have
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]


def fail(error: BaseException, report: Path, shown: bool = True) -> NoReturn:
    """Report an error, print it if ``shown``, and end the process with code 1."""
    written = None
    with contextlib.suppress(OSError):  # a full disk
        written = write_report(report, error)
    if shown or written is None:
        traceback.print_exception(error)
    if written and written["peer"]:
        time.sleep(_PEER_DELAY_S)
    _leave(1)


def _leave(code: int) -> NoReturn:
    """End the process now. A normal exit would destroy process groups and could wait for peers that have ended."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a log on a full disk
            stream.flush()
    os._exit(code)


def _leave_with_launcher() -> None:
    """Kill this process and its group as soon as the launching process has ended."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None  # this is a worker's process
    launcher.join()
    os.killpg(os.getpgrp(), signal.SIGKILL)
