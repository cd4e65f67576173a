"""Runs as jobs of a SLURM cluster: submitted through submitit, watched in the queue, ended with the launcher."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import LaunchError
from launchers import slurm_queue
from launchers.errors import Interrupted
from launchers.slurm_failure import explain
from launchers.slurm_queue import State
from launchers.slurm_worker import BLOCK, work
from launchers.stopping import StopSignals

_ROOT = Path(__file__).resolve().parents[1]
_UNKNOWN_S = 20.0  # for how long the queue may not know a job, or not answer, before that is taken for the truth
_SILENT_S = 300.0
_GONE_S = 60.0
# SLURM tells an attempt's credential from the one before by whole seconds: a job that is started in the second in which
# it was stopped ends as FAILED ("job credential revoked").
_STOPPED_S = 3.0


@dataclass(frozen=True)
class Task:
    """One run: ``entry(world, *args)`` on each rank; ``log_dir`` takes the logs of the ranks other than 0."""

    args: tuple
    log_dir: str


@dataclass
class Job:
    """A submitted run. ``error`` and ``done`` are set by ``wait``."""

    id: str
    task: Task
    folder: Path
    ranks: int
    time_min: int
    done: bool = False
    error: Exception | None = None
    state: State | None = field(default=None, repr=False)
    held: bool = field(default=False, repr=False)  # until a time that the user has set (launcher.sbatch={begin: …})
    again: float | None = field(default=None, repr=False)  # since when it is seen in the queue, to go on
    lifted: bool = field(default=False, repr=False)
    known: float = field(default_factory=time.monotonic, repr=False)

    @property
    def output(self) -> Path:
        """Rank 0's standard output."""
        return self.folder / f"{self.id}_0_log.out"

    @property
    def errors(self) -> Path:
        """Rank 0's standard error, and what srun has to say."""
        return self.folder / f"{self.id}_0_log.err"


def tasks_per_node(options: Any, processes: int) -> int:
    """Processes on each node. Raises LaunchError where ``processes`` cannot be dealt equally to ``options.nodes``."""
    nodes, given = options.nodes, options.tasks_per_node
    if nodes < 1:
        raise LaunchError(f"launcher.nodes={nodes} must be at least 1")
    if given is not None and given * nodes != processes:
        raise LaunchError(
            f"launcher.nodes={nodes} x launcher.tasks_per_node={given} = {given * nodes} processes, but the run has "
            f"{processes} (parallel.dp x parallel.pp); leave launcher.tasks_per_node out, or change one of them"
        )
    if processes % nodes:
        raise LaunchError(
            f"{processes} processes (parallel.dp x parallel.pp) cannot be dealt equally to launcher.nodes={nodes}; "
            "choose numbers where one divides the other"
        )
    return processes // nodes


def submit(
    entry: Callable,
    tasks: Sequence[Task],
    options: Any,
    processes: int,
    folder: str | os.PathLike,
    name: str,
    env: Mapping[str, str] | None = None,
) -> list[Job]:
    """Queue a job for each of ``tasks``, all of one shape, as one array where there are several.

    entry      a function at the top level of an importable module
    options    the configuration's section ``launcher`` (conf/schema/launcher.py)
    processes  ranks of each job
    folder     on a file system that the nodes share: submitit's files and the output of rank 0
    env        more environment variables for the ranks
    raises     LaunchError with sbatch's own words where the queue refuses
    """
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    per_node = tasks_per_node(options, processes)
    if options.signal_s >= options.time_min * 60:
        raise LaunchError(
            f"launcher.signal_s={options.signal_s} is not below the time limit, launcher.time_min={options.time_min} "
            f"({options.time_min * 60} s); set it lower"
        )
    slurm_queue.look(["0"])  # says in plain words that there is no SLURM
    folder = Path(folder).absolute()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            executor = SlurmExecutor(folder, max_num_timeout=0, python=f"{BLOCK} {shlex.quote(sys.executable)}")
            executor.update_parameters(**_parameters(options, per_node, name, env or {}))
            with executor.batch():
                queued = [
                    executor.submit(work, entry, task.args, str(folder), task.log_dir, options.max_requeues)
                    for task in tasks
                ]
    except (FailedJobError, FailedSubmissionError, ValueError) as error:
        words = said.getvalue().strip() or str(error)
        raise LaunchError(f"the queue does not take the job: {words.replace('sbatch: error: ', '')}") from None
    held = "begin" in options.sbatch
    return [
        Job(job.job_id, task, folder, processes, options.time_min, held=held)
        for job, task in zip(queued, tasks, strict=True)
    ]


def wait(jobs: Sequence[Job], poll_s: float, tell: Callable[[str], None]) -> None:
    """Return when all ``jobs`` have ended; ``job.error`` says why one has failed. Of a single job rank 0's output is
    shown as it comes.

    Raises Interrupted on SIGINT, SIGTERM or SIGHUP, and LaunchError when the queue does not answer any more; the jobs
    are cancelled then.
    """
    output = [_Tail(jobs[0].output, sys.stdout), _Tail(jobs[0].errors, sys.stderr)] if len(jobs) == 1 else []
    answered = time.monotonic()
    with StopSignals() as stop:
        try:
            while any(not job.done for job in jobs):
                try:
                    states = slurm_queue.look([job.id for job in jobs if not job.done])
                    answered = time.monotonic()
                    for job in jobs:
                        if not job.done:
                            _advance(job, states.get(job.id), tell)
                except LaunchError:
                    if time.monotonic() - answered > _SILENT_S:
                        raise
                for tail in output:
                    tail.show()
                deadline = time.monotonic() + poll_s
                while time.monotonic() < deadline and any(not job.done for job in jobs):
                    stop.check()
                    time.sleep(0.1)
        except Interrupted as interrupted:
            left = _cancel([job for job in jobs if not job.done])
            raise Interrupted(interrupted.signum, left) from None
        except BaseException:
            _cancel([job for job in jobs if not job.done])
            raise


def _advance(job: Job, state: State | None, tell: Callable[[str], None]) -> None:
    """Take note of what the queue says of ``job``; None: it does not know it."""
    now = time.monotonic()
    if state is None:
        if now - job.known > _UNKNOWN_S:
            job.done = True
            # Forgotten after its end, while nobody asked: then its ranks have left their results.
            finished = all((job.folder / f"{job.id}_{rank}_result.pkl").exists() for rank in range(job.ranks))
            job.error = None if finished else LaunchError(
                f"job {job.id} has vanished from the queue without an end; its output so far: {job.output}"
            )
        return
    job.known = now
    before, job.state = job.state, state
    if state.never:
        job.done, job.error = True, LaunchError(f"job {job.id} can never start: {state.never} ({state.reason})")
        slurm_queue.cancel([job.id])
        return
    if state.ended:
        job.done = True
        job.error = explain(job.id, state, job.folder, job.task.log_dir, job.ranks, job.time_min)
        return
    job.held = job.held and state.waits
    if not state.waits:
        job.again, job.lifted = None, False
    elif state.reason == "BeginTime" and not job.held and not job.lifted:
        job.again = job.again or now
        if now - job.again >= _STOPPED_S:
            slurm_queue.start_soon(job.id)
            job.lifted = True
    if before is None or before.waits != state.waits:
        where = f"waits in the queue ({state.reason})" if state.waits else f"runs on {state.nodes}"
        tell(f"job {job.id} {where}")


def _cancel(jobs: Sequence[Job]) -> str:
    """Ask the queue to end ``jobs`` and wait a moment for it; returns what has become of them, in words."""
    ids = [job.id for job in jobs]
    names = f"job{'s' * (len(ids) > 1)} {', '.join(ids)}"
    try:
        slurm_queue.cancel(ids)
        deadline = time.monotonic() + _GONE_S
        while any(not state.ended for state in slurm_queue.look(ids).values()):
            if time.monotonic() > deadline:
                return f"the queue was asked to cancel {names}, which had not ended after {_GONE_S:g} s"
            time.sleep(0.2)
    except LaunchError as error:
        return f"{names} may still run: {error}; cancel with: scancel {' '.join(ids)}"
    return f"{names} cancelled"


def _parameters(options: Any, per_node: int, name: str, env: Mapping[str, str]) -> dict[str, Any]:
    """submitit's parameters."""
    setup = list(options.setup)
    # srun takes --cpus-per-task from here only (SLURM 22.05 and later).
    if options.cpus_per_task is not None:
        setup.append(f"export SRUN_CPUS_PER_TASK={options.cpus_per_task}")
    setup.append(f"export PYTHONPATH={shlex.quote(str(_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}")
    setup += [f"export {key}={shlex.quote(value)}" for key, value in env.items()]
    wanted = {
        "job_name": name,
        "nodes": options.nodes,
        "ntasks_per_node": per_node,
        "cpus_per_task": options.cpus_per_task,
        "mem": None if options.mem_gb is None else f"{int(options.mem_gb * 1024)}M",
        "gpus_per_node": options.gpus_per_node,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time_min,
        "signal_delay_s": options.signal_s,
        "array_parallelism": options.max_parallel,
        "setup": setup,
        "srun_args": ["--kill-on-bad-exit=1", "--distribution=block"],
        "additional_parameters": {"requeue": True, **options.sbatch},
    }
    return {key: value for key, value in wanted.items() if value is not None}


class _Tail:
    """Shows what is written to a file, without the lines of those in between."""

    def __init__(self, path: Path, stream) -> None:
        self._path, self._stream, self._offset, self._rest = path, stream, 0, b""

    def show(self) -> None:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return
        self._offset += len(new)
        lines = (self._rest + new).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if not line.startswith((b"submitit ", b"srun: ", b"slurmstepd")):
                print(line.decode(errors="replace"), file=self._stream, flush=True)
