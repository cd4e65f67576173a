"""Queues runs: fills in launchers/train.sbatch and passes it to sbatch. No command here needs accounting."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import LaunchError

_ROOT = Path(__file__).resolve().parents[2]
_TEMPLATE = _ROOT / "launchers" / "train.sbatch"
_COMMAND_S = 30.0
_SUBMIT_S = 300.0  # long: a job that is queued after a time-out of sbatch would run unnoticed
# The options of sbatch on which the launcher relies to follow a job, or which it has as its own options.
_RESERVED = {
    "array", "error", "export", "nodes", "ntasks", "ntasks-per-node", "output", "parsable", "signal", "test-only",
    "time", "wait", "wrap",
}  # fmt: skip


@dataclass
class Job:
    """A submitted run.

    Attributes:
        id: Its number as squeue shows it: 12, or 12_0 in an array.
        folder: The folder with its output and the reports of its ranks.
        log_dir: The folder with the logs of the ranks other than 0.
        ranks: The number of its processes.
        done: Whether it has ended. ``follow.wait`` sets this and the attributes below.
        error: The error with which it has failed; None if it has not failed.
        shown: The last line about it on the console.
        ended: When the queue first reported its end, or did not know it.
    """

    id: str
    folder: Path
    log_dir: Path
    ranks: int
    done: bool = False
    error: Exception | None = None
    shown: str = ""
    ended: float | None = None

    @property
    def output(self) -> Path:
        """Rank 0's standard output."""
        return self.folder / f"{self.id}.out"

    @property
    def errors(self) -> Path:
        """Rank 0's standard error and srun's messages."""
        return self.folder / f"{self.id}.err"


def submit(
    arguments: Sequence[str],
    log_dirs: Sequence[Path],
    options: Any,
    processes: int,
    folder: str | os.PathLike,
    name: str,
    env: Mapping[str, str] | None = None,
) -> list[Job]:
    """Queue a job for each of ``log_dirs``, all of the same shape; several are one array.

    Args:
        arguments: The arguments of Python in each task of each job, such as ["-m", "module", "argument"]. The code
            should call ``task.work``. ``task.array_index`` returns the index of its job.
        log_dirs: For each job, the folder for the logs of the ranks other than 0.
        options: The section ``launcher`` of the configuration (conf/schema.py).
        processes: The number of ranks of each job.
        folder: The folder for the script, the output of rank 0 and the reports of the ranks. All nodes must share it.
        name: The name of the jobs.
        env: More environment variables for the ranks.

    Raises:
        LaunchError: If the queue refuses the jobs (with sbatch's message), or the processes cannot be divided among the
            nodes.
    """
    if processes % options.nodes:
        raise LaunchError(
            f"{processes} process{'es' * (processes > 1)} (the product of parallel.dp, parallel.pp and other axes) "
            f"cannot be divided equally among launcher.nodes={options.nodes}; choose a number of nodes that divides "
            "the processes"
        )
    folder, count = Path(folder).absolute(), len(log_dirs)
    file = "%j" if count == 1 else "%A_%a"
    as_pattern = str(folder).replace("%", "%%")  # sbatch would replace %j in the folder's name, too
    at_once = "" if options.max_parallel is None else f"%{options.max_parallel}"
    flags = {
        "job-name": name,
        "nodes": options.nodes,
        "ntasks-per-node": processes // options.nodes,
        "cpus-per-task": options.cpus_per_task,
        "mem": None if options.mem_gb is None else f"{int(options.mem_gb * 1024)}M",
        "gpus-per-node": options.gpus_per_node,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time_min,
        "signal": f"USR2@{options.signal_s}",
        "array": None if count == 1 else f"0-{count - 1}{at_once}",
        "output": f"{as_pattern}/{file}.out",
        "error": f"{as_pattern}/{file}.err",
        "export": "ALL",  # also where SBATCH_EXPORT=NONE is set
        **{str(key).replace("_", "-"): value for key, value in (options.sbatch or {}).items()},
    }
    # The ranks run in a container (pyxis: container_image). Options of sbatch would put the script there, too, which
    # calls srun.
    container = {key: flags.pop(key) for key in list(flags) if re.match(r"(no-)?container", key)}
    python = "python" if "container-image" in container else sys.executable
    script = folder / "job.sh"
    write_private(script, _script([python, "-u", *arguments], options.setup, env or {}, _words(container)))
    done = ask(["sbatch", "--parsable", *_words(flags), str(script)], _SUBMIT_S)
    if done.returncode:
        raise LaunchError(f"the queue does not accept the job: {done.stderr.strip().replace('sbatch: error: ', '')}")
    number = done.stdout.strip().partition(";")[0]
    ids = [number] if count == 1 else [f"{number}_{index}" for index in range(count)]
    return [Job(id, folder, Path(logs), processes) for id, logs in zip(ids, log_dirs, strict=True)]


def check_options(options: Any) -> None:
    """Check the options that do not depend on the number of processes. Raises LaunchError."""
    if options.nodes < 1:
        raise LaunchError(f"launcher.nodes={options.nodes} must be at least 1")
    if options.signal_s >= options.time_min * 60:
        raise LaunchError(
            f"launcher.signal_s={options.signal_s} is not below the time limit, launcher.time_min={options.time_min} "
            f"({options.time_min * 60} s); set it lower"
        )
    if not hasattr(options.sbatch or {}, "keys"):
        raise LaunchError(
            f"launcher.sbatch={options.sbatch} must be a mapping, such as launcher.sbatch={{constraint: a100}}"
        )
    if refused := {str(key).replace("_", "-") for key in options.sbatch or {}} & _RESERVED:
        raise LaunchError(
            f"launcher.sbatch: {', '.join(sorted(refused))} cannot be set there, because the launcher sets them to "
            "follow its jobs; use launcher.nodes, .tasks_per_node, .time_min, .signal_s and .setup"
        )


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read: it may contain secrets. Its folder is made if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.chmod(0o600)  # also a file that exists
    path.write_text(text, encoding="utf-8")


def ask(command: Sequence[str], timeout_s: float = _COMMAND_S) -> subprocess.CompletedProcess:
    """Run one of SLURM's commands. Raises LaunchError if it is missing or does not answer."""
    try:
        return subprocess.run(command, text=True, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} not found: launcher=slurm works on machines from which SLURM's commands reach a cluster; "
            "use launcher=local to run without a cluster (tests/launchers/local_cluster.py starts a small one)"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} did not answer within {timeout_s:g} s") from None


def _words(flags: Mapping[str, Any]) -> list[str]:
    return [
        f"--{key}" if value is True else f"--{key}={value}"
        for key, value in flags.items()
        if value is not None and value is not False
    ]


def _script(command: Sequence[str], setup: Sequence[str], env: Mapping[str, str], srun: Sequence[str]) -> str:
    """Return the template with the shell lines ``setup``, the variables ``env`` and the given ``command``.

    ``srun`` are options of srun.
    """
    lines = [
        *setup,
        f"export PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(str(_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
        *(f"export {shlex.quote(f'{key}={value}')}" for key, value in env.items()),
        f"run=({shlex.join(command)})",
        *([f"srun_options=({shlex.join(srun)})"] if srun else []),
    ]
    paragraph = re.compile(r"^run=.*?\n\n", re.MULTILINE | re.DOTALL)
    return paragraph.sub(lambda _: "\n".join([*lines, "", ""]), _TEMPLATE.read_text())
