"""SLURM's queue, asked through its own commands; none of them needs accounting (sacct)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import LaunchError

_COMMAND_S = 30.0
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
UNDER_WAY = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")

# Why a job waits that no waiting will start. (Others pass: Priority, Resources, a node that is down.)
_NEVER = {
    "PartitionNodeLimit": "it asks for more nodes than the partition has",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "BadConstraints": "no node is as it asks for",
    "AccountNotAllowed": "its account may not use the partition",
    "InvalidAccount": "its account is not known",
    "InvalidQOS": "its qos is not known",
    "QOSNotAllowed": "its qos may not use the partition",
    "AccountingPolicy": "its account does not allow such a job",
    "DependencyNeverSatisfied": "the job that it depends on has failed",
    "QOSMaxNodePerJobLimit": "it asks for more nodes than its qos allows",
    "QOSMaxCpuPerJobLimit": "it asks for more CPUs than its qos allows",
    "QOSMaxMemoryPerJob": "it asks for more memory than its qos allows",
    "QOSMaxWallDurationPerJobLimit": "it asks for more time than its qos allows",
    "AssocMaxNodePerJobLimit": "it asks for more nodes than its account allows",
    "AssocMaxCpuPerJobLimit": "it asks for more CPUs than its account allows",
    "AssocMaxWallDurationPerJobLimit": "it asks for more time than its account allows",
}


@dataclass(frozen=True)
class State:
    """A job as squeue shows it: its state's name, why it waits or has failed, and its nodes in SLURM's short form."""

    name: str
    reason: str
    nodes: str

    @property
    def waits(self) -> bool:
        return self.name in WAITING

    @property
    def ended(self) -> bool:
        return self.name not in WAITING and self.name not in UNDER_WAY

    @property
    def never(self) -> str | None:
        """Why the job cannot ever start, in words; None where it may."""
        return _NEVER.get(self.reason) if self.name == "PENDING" else None


def look(jobs: Iterable[str]) -> dict[str, State]:
    """The states of those of ``jobs`` that the queue knows (it forgets a job minutes after its end).

    jobs: numbers as sbatch gives them, 12 or, of an array, 12_0. Raises LaunchError where the queue does not answer.
    """
    wanted = set(jobs)
    numbers = ",".join(sorted({job.partition("_")[0] for job in wanted}))
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N", f"--jobs={numbers}"]
    done = _run(command)
    if done.returncode and "Invalid job id" not in done.stderr:
        raise LaunchError(f"squeue: {done.stderr.strip()}")
    found = {}
    for line in done.stdout.splitlines():
        job, _, rest = line.strip().partition("|")
        if job in wanted:
            found[job] = State(*rest.split("|", 2))
    return found


def cancel(jobs: Iterable[str]) -> None:
    """Ask the queue to end ``jobs``. Raises LaunchError where it does not answer."""
    jobs = list(jobs)
    if jobs:
        done = _run(["scancel", *jobs])
        if done.returncode:
            raise LaunchError(f"scancel: {done.stderr.strip()}")


def requeue(job: str) -> None:
    """Stop ``job``'s processes and put it into the queue again. Raises LaunchError where that is refused."""
    done = _run(["scontrol", "requeue", job])
    # Below 0: asked by the job itself, scontrol is one of the processes that are stopped, maybe before it returns.
    if done.returncode > 0:
        raise LaunchError(f"scontrol requeue {job}: {done.stderr.strip()}")


def start_soon(job: str) -> None:
    """Lift the two minutes for which SLURM holds a job back that was queued again. A refusal does no harm.

    Not in the second in which the job was stopped: its nodes would refuse it.
    """
    _run(["scontrol", "update", f"JobId={job}", "StartTime=now"])


def _run(command: list[str]) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, text=True, capture_output=True, timeout=_COMMAND_S, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} not found: launcher=slurm works on machines from which SLURM's commands reach a cluster; "
            "launcher=local needs none (launchers/local_cluster.py starts a small one)"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} did not answer within {_COMMAND_S:g} s") from None
