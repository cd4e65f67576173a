"""What happens in a task of a SLURM job around the user's function."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from common.errors import LaunchError
from launchers import slurm_queue, stopping
from launchers.failure import log_path, write_report
from launchers.stopping import Stopped
from launchers.worker import PEER_DELAY_S, redirect_output
from launchers.world import World, restarts

# The signal that announces the time limit. It is blocked from the first instruction on (by BLOCK) and never delivered:
# launchers.stopping asks whether it is pending. So it can strike nowhere, not in a loader's workers either.
SIGNAL = signal.SIGUSR2
BLOCK = "env --block-signal=USR2"
MAX_REQUEUES = 100
_KILLED_S = 120.0

_reports: list[Path] = []  # this task's, once there is one


def job_id(environ: Mapping[str, str] = os.environ) -> str:
    """The number of this job as squeue shows it: 12, or 12_0 in an array."""
    array = environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environ['SLURM_ARRAY_TASK_ID']}" if array else environ["SLURM_JOB_ID"]


def report_path(folder: str | os.PathLike, job: str, rank: int) -> Path:
    """Where a rank leaves its error."""
    return Path(folder) / f"{job}_{rank}_error.json"


def work(entry: Callable, args: tuple, folder: str, log_dir: str, max_requeues: int) -> None:
    """Runs ``entry(world, *args)``. The function that submitit starts, in each task.

    An exception is written to report_path and ends the process with code 1, without any clean-up that could wait for a
    peer. Stopped puts the job into the queue again.
    """
    # SIGTERM comes before SIGKILL in a preemption; submitit's own handlers would only log it.
    stopping.install_handlers()
    stopping.expect_echo()
    world = World.detect() or World.alone()
    report = report_path(folder, job_id(), world.rank)
    _reports.append(report)
    report.unlink(missing_ok=True)
    log = log_path(log_dir, world.rank)
    if world.rank > 0:
        log.parent.mkdir(parents=True, exist_ok=True)
        redirect_output(log)
    try:
        try:
            entry(world, *args)
        except Stopped as stopped:
            go_on_later(world, str(stopped), max_requeues)
    except BaseException as error:
        leave(error)
    finally:
        sys.stdout.flush()
        if world.rank > 0 and log.exists() and log.stat().st_size == 0:
            log.unlink()


def go_on_later(world: World, why: str, max_requeues: int) -> None:
    """Put this job into the queue again, as rank 0, and wait for the end that this brings to all ranks.

    Raises LaunchError where it was queued again ``max_requeues`` times already, where the queue refuses, and after
    SIGTERM: then the job was cancelled, or SLURM itself puts it into the queue again.
    """
    if stopping.noted() == signal.SIGTERM and SIGNAL not in signal.sigpending():
        raise LaunchError(f"{why}, on SIGTERM")
    if restarts() >= max_requeues:
        raise LaunchError(f"{why}; it was queued again {restarts()} times already (launcher.max_requeues)")
    if world.rank == 0:
        print(f"{why}; the job waits in the queue to go on", flush=True)
        slurm_queue.requeue(job_id())
    time.sleep(_KILLED_S)
    raise LaunchError(f"{why}, but the queue has not ended this attempt within {_KILLED_S:g} s")


def leave(error: BaseException) -> NoReturn:
    """End this task as failed, from whichever thread, once ``work`` has begun."""
    traceback.print_exception(error)
    try:
        if write_report(_reports[0], error)["peer"]:
            # So that the rank that broke the connection is seen to fail first.
            time.sleep(PEER_DELAY_S)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
