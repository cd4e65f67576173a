"""A task of a SLURM job: it calls the caller's function, writes a report, and queues a stopped job again."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import LaunchError
from launchers import stopping
from launchers.failure import read_report, remove_empty_log
from launchers.slurm.submit import ask
from launchers.stopping import Stopped
from launchers.worker import fail, redirect_output
from launchers.world import World, restarts

# The signal that announces the time limit. launchers/train.sbatch blocks it from the first instruction on. It is never
# delivered, so it cannot end the workers of a data loader. launchers.stopping checks whether it is pending.
SIGNAL = signal.SIGUSR2
MAX_REQUEUES = 100
_KILLED_S = 120.0


def array_index() -> int:
    """Return the index of this job in its array, from 0; 0 for a job without an array."""
    return int(os.environ.get("SLURM_ARRAY_TASK_ID") or 0)


def job_id() -> str:
    """Return the number of this job as squeue shows it: 12, or 12_0 in an array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{array_index()}" if array else os.environ["SLURM_JOB_ID"]


def read_reports(folder: Path, job: str, ranks: int) -> dict[int, dict | None]:
    """Return the report of each rank of ``job``: its error (see launchers.failure), {} if it has finished, or None."""
    return {rank: read_report(_report_path(folder, job, rank)) for rank in range(ranks)}


def work(entry: Callable[[World], None], folder: Path, log_dir: Path, max_requeues: int) -> None:
    """Run ``entry(world)`` as one task of a job, and leave a report on how it has ended.

    An exception ends the process with code 1, without any clean-up that could wait for a peer. After Stopped, the job
    is queued again.

    Args:
        entry: The work of the task.
        folder: The folder for the reports (see ``submit``).
        log_dir: The folder for the logs of the ranks other than 0.
        max_requeues: How often the job may be queued again.
    """
    # SIGTERM comes before SIGKILL in a preemption.
    stopping.install_handlers()
    world = World.detect() or World.alone()
    report = _report_path(folder, job_id(), world.rank)
    report.unlink(missing_ok=True)
    if world.rank > 0:
        redirect_output(log_dir, world.rank)
    try:
        with requeued(world, max_requeues):
            entry(world)
    except BaseException as error:
        fail(error, report)
    report.write_text("{}")
    sys.stdout.flush()
    if world.rank > 0:
        remove_empty_log(log_dir, world.rank)


@contextmanager
def requeued(world: World, max_requeues: int = MAX_REQUEUES) -> Iterator[None]:
    """Queue this job again if the block raises Stopped, and wait until SLURM ends this attempt.

    Raises:
        LaunchError: If the job was queued again ``max_requeues`` times already; if it was queued again and has trained
            no step since; if the queue refuses; or if SIGTERM stopped the block: then the job was cancelled, or SLURM
            itself queues it again.
    """
    try:
        yield
    except Stopped as stopped:
        if stopping.noted() == signal.SIGTERM and SIGNAL not in signal.sigpending():
            raise LaunchError(f"{stopped}, on SIGTERM") from stopped
        if restarts() >= max_requeues:
            times = f"it was queued again {restarts()} times already (launcher.max_requeues)"
            raise LaunchError(f"{stopped}; {times}") from stopped
        if restarts() > 0 and stopped.steps == 0:
            raise LaunchError(
                f"{stopped}; the job was queued again and has trained no step since: too little time. Set "
                "launcher.time_min (sbatch --time) higher, or launcher.signal_s (sbatch --signal) lower"
            ) from stopped
        if world.rank == 0:
            print(f"{stopped}; the job waits in the queue to continue", flush=True)
            done = ask(["scontrol", "requeue", job_id()])
            # Below 0 if SLURM has ended scontrol, with all processes of the job, before it returned.
            if done.returncode > 0:
                raise LaunchError(f"scontrol requeue: {done.stderr.strip()}") from stopped
        time.sleep(_KILLED_S)
        raise LaunchError(f"{stopped}, but the queue has not ended this attempt within {_KILLED_S:g} s") from stopped


def _report_path(folder: Path, job: str, rank: int) -> Path:
    return Path(folder) / f"{job}_{rank}.json"
