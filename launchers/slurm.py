"""Runs as jobs of a SLURM cluster: launchers/train.sbatch is filled in and submitted, and the jobs are followed."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from common.errors import LaunchError
from launchers import slurm_queue
from launchers.slurm_failure import explain
from launchers.slurm_queue import State
from launchers.slurm_worker import read_reports
from launchers.stopping import Interrupted, StopSignals

_ROOT = Path(__file__).resolve().parents[1]
_TEMPLATE = Path(__file__).with_name("train.sbatch")
_UNKNOWN_S = 20.0  # how long the queue may not know a job before the job counts as gone
_SILENT_S = 300.0  # how long the queue may not answer at all
_GONE_S = 60.0  # how long a job that was cancelled may take to end
_LATE_S = 30.0  # how long a rank's report may stay unseen after the job's end: NFS looks into a folder again after that
_NEVER_S = 300.0  # how long a job may wait for what cannot be: a node that is down comes back, limits are changed
# Options of sbatch that launcher.sbatch cannot change, as the launcher follows the job by them.
_OWN = {
    "array": "a sweep (-m) is an array",
    "error": "the command follows the job by its output, in the folder of the run (hydra.run.dir)",
    "export": "ranks need the environment of this command; launcher.setup=['export NAME=VALUE'] adds to it",
    "nodes": "set launcher.nodes",
    "ntasks": "set launcher.nodes and launcher.tasks_per_node",
    "ntasks-per-node": "set launcher.tasks_per_node",
    "output": "the command follows the job by its output, in the folder of the run (hydra.run.dir)",
    "parsable": "it is set already",
    "signal": "set launcher.signal_s",
    "test-only": "mode=plan shows what would run",
    "time": "set launcher.time_min",
    "wait": "set launcher.wait",
    "wrap": "the job is launchers/train.sbatch; launcher.setup=[COMMAND] runs a command before",
}


@dataclass
class Job:
    """A submitted run.

    Attributes:
        id: Its number as squeue shows it: 12, or 12_0 in an array.
        folder: Where its output and the reports of its ranks are.
        log_dir: Where the ranks other than 0 write their logs.
        ranks: The number of its processes.
        time_min: Its time limit in minutes.
        done: Whether it has ended. Set by ``wait``.
        error: Why it has failed, None where it has not. Set by ``wait``.
    """

    id: str
    folder: Path
    log_dir: Path
    ranks: int
    time_min: int
    done: bool = False
    error: Exception | None = None
    _state: State | None = field(default=None, repr=False)
    _known: float = field(default_factory=time.monotonic, repr=False)
    _since: float = field(default_factory=time.monotonic, repr=False)  # when it came into its state

    @property
    def output(self) -> Path:
        """Rank 0's standard output."""
        return self.folder / f"{self.id}.out"

    @property
    def errors(self) -> Path:
        """Rank 0's standard error and srun's messages."""
        return self.folder / f"{self.id}.err"

    def update(self, state: State | None, tell: Callable[[str], None]) -> None:
        """Note what the queue says about the job.

        Args:
            state: The job's state; None where the queue does not know the job.
            tell: Called with a line for the user when the job starts to wait, waits for another reason, or starts to
                run.
        """
        if state is None:
            if time.monotonic() - self._known > _UNKNOWN_S:
                self.done = True
                # The queue may have forgotten a finished job while nobody asked.
                finished = all(report == {} for report in read_reports(self.folder, self.id, self.ranks).values())
                if not finished:
                    self.error = LaunchError(
                        f"job {self.id} has vanished from the queue without an end; its output so far: {self.output}"
                    )
            return
        now = time.monotonic()
        if self._state is None or (self._state.name, self._state.reason) != (state.name, state.reason):
            self._since = now
        before, self._state, self._known = self._state, state, now
        if state.never and now - self._since >= _NEVER_S:
            self.done = True
            waited = f"it waited for {state.reason} for {_NEVER_S / 60:g} min, and was cancelled"
            self.error = LaunchError(f"job {self.id} does not start: {state.never}; {waited}")
            slurm_queue.cancel([self.id])
        elif state.ended:
            unseen = state.name == "COMPLETED" and None in read_reports(self.folder, self.id, self.ranks).values()
            if not unseen or now - self._since >= _LATE_S:
                self.done = True
                self.error = explain(self.id, state, self.folder, self.log_dir, self.ranks, self.time_min)
        elif state.waits and (before is None or not before.waits or before.reason != state.reason):
            never = f": {state.never}; it is cancelled if that lasts {_NEVER_S / 60:g} min" if state.never else ""
            tell(f"job {self.id} waits in the queue ({state.reason}{never})")
        elif not state.waits and (before is None or before.waits):
            tell(f"job {self.id} runs on {state.nodes}")


def tasks_per_node(options: Any, processes: int) -> int:
    """Return the number of processes on each node.

    Args:
        options: The section ``launcher`` of the configuration (conf/schema.py).
        processes: The number of processes of the run.

    Raises:
        LaunchError: The processes cannot be divided equally among ``options.nodes``.
    """
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
    arguments: Sequence[str],
    log_dirs: Sequence[Path],
    options: Any,
    processes: int,
    folder: str | os.PathLike,
    name: str,
    env: Mapping[str, str] | None = None,
) -> list[Job]:
    """Queue a job for each of ``log_dirs``, all of the same shape, as one array where there are several.

    Args:
        arguments: What Python runs in each task of each job, such as ["-m", "module", "argument"]; it should call
            launchers.slurm_worker.work. ``slurm_worker.array_index`` tells it which job it belongs to.
        log_dirs: Where the ranks of each job other than 0 write their logs.
        options: The section ``launcher`` of the configuration (conf/schema.py).
        processes: The number of ranks of each job.
        folder: Where the script, the output of rank 0 and the ranks' reports go; on a file system that all nodes share.
        name: The name of the jobs.
        env: More environment variables for the ranks.

    Raises:
        LaunchError: The queue refuses the jobs (with sbatch's own words), or the options contradict each other.
    """
    per_node = tasks_per_node(options, processes)
    if options.signal_s >= options.time_min * 60:
        raise LaunchError(
            f"launcher.signal_s={options.signal_s} is not below the time limit, launcher.time_min={options.time_min} "
            f"({options.time_min * 60} s); set it lower"
        )
    check_options(options)
    folder, count = Path(folder).absolute(), len(log_dirs)
    file = "%j" if count == 1 else "%A_%a"
    at_once = "" if options.max_parallel is None else f"%{options.max_parallel}"
    flags = {
        "job-name": name,
        "nodes": options.nodes,
        "ntasks-per-node": per_node,
        "cpus-per-task": options.cpus_per_task,
        "mem": None if options.mem_gb is None else f"{int(options.mem_gb * 1024)}M",
        "gpus-per-node": options.gpus_per_node,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time_min,
        "signal": f"USR2@{options.signal_s}",
        "array": None if count == 1 else f"0-{count - 1}{at_once}",
        "output": folder / f"{file}.out",
        "error": folder / f"{file}.err",
        **{str(key).replace("_", "-"): value for key, value in (options.sbatch or {}).items()},
    }
    # A container (pyxis: container_image) is for the ranks: with sbatch it would hold the script, which calls srun.
    container = {key: flags.pop(key) for key in list(flags) if re.match(r"(no-)?container", key)}
    python = "python" if "container-image" in container else sys.executable
    script = folder / "job.sh"
    write_private(script, _script([python, "-u", *arguments], options.setup, env or {}, _words(container)))
    _check_nodes(flags)
    number = slurm_queue.submit([*_words(flags), str(script)])
    numbers = [number] if count == 1 else [f"{number}_{index}" for index in range(count)]
    return [
        Job(id, folder, Path(log_dir), processes, options.time_min)
        for id, log_dir in zip(numbers, log_dirs, strict=True)
    ]


def _words(flags: Mapping[str, Any]) -> list[str]:
    return [
        f"--{key}" if value is True else f"--{key}={value}"
        for key, value in flags.items()
        if value is not None and value is not False
    ]


def _check_nodes(flags: Mapping[str, Any]) -> None:
    """Check that nodes have the processors that are asked for: the queue may keep a job that none can run for ever."""
    if flags.get("overcommit") or flags.get("clusters") or not str(flags["cpus-per-task"] or 1).isdigit():
        return
    cpus = sorted(slurm_queue.node_cpus(flags.get("partition")), reverse=True)
    nodes, per_node, per_process = flags["nodes"], flags["ntasks-per-node"], int(flags["cpus-per-task"] or 1)
    needed = per_node * per_process
    enough = sum(count >= needed for count in cpus)
    if enough < min(nodes, len(cpus)):
        most = cpus[min(nodes, len(cpus)) - 1] // per_node
        raise LaunchError(
            f"launcher.nodes={nodes} needs {needed} CPUs per node, for {per_node} process{'es' * (per_node > 1)} of "
            f"launcher.cpus_per_task={per_process}, but {enough} of the partition's {len(cpus)} nodes have as many and "
            f"the largest has {cpus[0]}; "
            + (f"set launcher.cpus_per_task={most} at most" if most else "set launcher.nodes higher")
        )


def check_options(options: Any) -> None:
    """Check what becomes an argument of sbatch. Raises LaunchError."""
    if not isinstance(options.sbatch or {}, Mapping):
        raise LaunchError(f"launcher.sbatch={options.sbatch} must be options and their values: {{constraint: a100}}")
    for key, value in (options.sbatch or {}).items():
        if why := _OWN.get(str(key).replace("_", "-")):
            raise LaunchError(f"launcher.sbatch.{key} is not allowed: {why}")
        _check_word(f"launcher.sbatch.{key}", key)
        _check_word(f"launcher.sbatch.{key}", value)
    for key in ("partition", "account", "qos"):
        _check_word(f"launcher.{key}", getattr(options, key))


def _check_word(key: str, value: Any) -> None:
    if value is not None and not str(value).isprintable():
        raise LaunchError(f"{key}={str(value)!r} holds a control character, which no option of sbatch has: take it out")


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read: a configuration may hold secrets. Its folder is made if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)


def wait(jobs: Sequence[Job], poll_s: float, tell: Callable[[str], None]) -> None:
    """Return when all ``jobs`` have ended; ``job.error`` says why one has failed.

    The output of rank 0 is shown as it comes, where there is only one job.

    Args:
        jobs: What ``submit`` returned.
        poll_s: The time between two looks at the queue, in seconds.
        tell: Called with a line for the user when a job starts to wait, waits for another reason, or starts to run.

    Raises:
        Interrupted: On SIGINT, SIGTERM or SIGHUP, after the jobs were cancelled.
        LaunchError: The queue does not answer any more. The jobs are cancelled, if that is possible.
    """
    shown = [_show(jobs[0].output, sys.stdout), _show(jobs[0].errors, sys.stderr)] if len(jobs) == 1 else []
    answered = time.monotonic()
    with StopSignals() as stop:
        try:
            while left := [job for job in jobs if not job.done]:
                try:
                    states = slurm_queue.look([job.id for job in left])
                    answered = time.monotonic()
                    for job in left:
                        job.update(states.get(job.id), tell)
                except LaunchError:
                    if time.monotonic() - answered > _SILENT_S:
                        raise
                for output in shown:
                    next(output)
                deadline = time.monotonic() + poll_s
                while time.monotonic() < deadline and not all(job.done for job in jobs):
                    stop.check()
                    time.sleep(0.1)
        except Interrupted as interrupted:
            raise Interrupted(interrupted.signum, _cancel(jobs)) from None
        except BaseException:
            _cancel(jobs)
            raise


def _cancel(jobs: Sequence[Job]) -> str:
    """Have the queue end those of ``jobs`` that have not ended, and wait for it: what has become of them, in words."""
    ids = [job.id for job in jobs if not job.done]
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


def _script(command: Sequence[str], setup: Sequence[str], env: Mapping[str, str], srun: Sequence[str]) -> str:
    """The template with the shell lines ``setup``, the variables ``env``, and ``command`` in place of train.py's.

    ``srun`` are options of srun.
    """
    lines = [
        *setup,
        f"export PYTHONPATH={shlex.quote(str(_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
        *(f"export {shlex.quote(f'{key}={value}')}" for key, value in env.items()),
        f"run=({shlex.join(command)})",
        *([f"srun_options=({shlex.join(srun)})"] if srun else []),
    ]
    paragraph = re.compile(r"^run=.*?\n\n", re.MULTILINE | re.DOTALL)
    script, count = paragraph.subn(lambda _: "\n".join([*lines, "", ""]), _TEMPLATE.read_text())
    assert count == 1, f"{_TEMPLATE} has no paragraph `run=`"
    return script


def _show(path: Path, stream: TextIO) -> Iterator[None]:
    """Each time that it is resumed: print what was written to ``path`` meanwhile, without SLURM's own lines."""
    offset, rest = 0, b""
    while True:
        with suppress(OSError), open(path, "rb") as file:
            file.seek(offset)
            new = file.read()
            offset += len(new)
            *lines, rest = (rest + new).split(b"\n")
            for line in lines:
                if not line.startswith((b"srun: ", b"slurmstepd")):
                    print(line.decode(errors="replace"), file=stream, flush=True)
        yield
