"""SLURM's queue, asked through its own commands; none of them needs accounting (sacct)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import LaunchError

_COMMAND_S = 30.0
_SUBMIT_S = 300.0  # a job that is queued although sbatch was given up would be nobody's
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
UNDER_WAY = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")

# Why a job waits that will hardly start. (Other reasons pass: Priority, Resources, a node that is down.)
_NEVER = {
    "PartitionConfig": "no nodes of the partition have what it asks for",
    "PartitionNodeLimit": "it asks for more nodes than the partition has",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "BadConstraints": "no node is as it asks for",
    "AccountNotAllowed": "its account may not use the partition",
    "InvalidAccount": "its account is not known",
    "InvalidQOS": "its qos is not known",
    "QOSNotAllowed": "its qos may not use the partition",
    "AccountingPolicy": "its account does not allow such a job",
    "DependencyNeverSatisfied": "the job that it depends on has failed",
}
# QOSMaxNodePerJobLimit, AssocMaxWallDurationPerJobLimit, …
_TOO_MUCH = re.compile(r"(QOS|Assoc)Max\w+PerJob")


@dataclass(frozen=True)
class State:
    """A job as squeue shows it.

    Attributes:
        name: The name of its state, such as PENDING.
        reason: Why it waits or has failed, in SLURM's word.
        nodes: Its nodes in SLURM's short form, such as n[1-2].
    """

    name: str
    reason: str
    nodes: str

    @property
    def waits(self) -> bool:
        """Whether the job is in the queue and does not run."""
        return self.name in WAITING

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self.name not in WAITING and self.name not in UNDER_WAY

    @property
    def never(self) -> str | None:
        """Why the job cannot start as things are, in words; None where it may."""
        if self.name != "PENDING":
            return None
        if _TOO_MUCH.match(self.reason):
            return "it asks for more than its qos or its account allows a job"
        return _NEVER.get(self.reason)


def look(jobs: Iterable[str]) -> dict[str, State]:
    """Return the states of those of ``jobs`` that the queue knows (it forgets a job minutes after its end).

    Args:
        jobs: Numbers as squeue shows them: 12, or 12_0 in an array.

    Raises:
        LaunchError: The queue does not answer.
    """
    wanted = set(jobs)
    numbers = ",".join(sorted({job.partition("_")[0] for job in wanted}))
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N", f"--jobs={numbers}"]
    done = _run(command)
    if done.returncode and "Invalid job id" not in done.stderr:
        raise LaunchError(f"squeue: {done.stderr.strip()}")
    states = {}
    for line in done.stdout.splitlines():
        job, _, rest = line.strip().partition("|")
        if job in wanted:
            states[job] = State(*rest.split("|", 2))
    return states


def node_cpus(partition: str | None) -> list[int]:
    """Return the number of CPUs of each node; of no node where the queue does not say.

    Args:
        partition: One or several, with commas between them. None: the default one.
    """
    partition = partition or os.environ.get("SBATCH_PARTITION")
    chosen = [f"--partition={partition}"] if partition else []
    try:
        done = _run(["sinfo", "--noheader", "--Node", "--format=%c|%P|%N", *chosen])
    except LaunchError:
        return []
    rows = [line.strip().split("|") for line in done.stdout.splitlines() if re.match(r"\s*\d+\|", line)]
    default = [row for row in rows if row[1].endswith("*")]
    nodes = {node: int(cpus) for cpus, _, node in (rows if partition else default)}
    return list(nodes.values())


def cancel(jobs: Iterable[str]) -> None:
    """Ask the queue to end ``jobs``.

    Raises:
        LaunchError: The queue does not answer.
    """
    jobs = list(jobs)
    if jobs:
        done = _run(["scancel", *jobs])
        if done.returncode:
            raise LaunchError(f"scancel: {done.stderr.strip()}")


def requeue(job: str) -> None:
    """Stop the processes of ``job`` and put it into the queue again.

    SLURM holds it back for the lifetime of a credential, two minutes by default.

    Raises:
        LaunchError: The queue refuses.
    """
    done = _run(["scontrol", "requeue", job])
    # Below 0: asked by the job itself, scontrol is one of the processes that are stopped, maybe before it returns.
    if done.returncode > 0:
        raise LaunchError(f"scontrol requeue {job}: {done.stderr.strip()}")


def submit(arguments: Iterable[str]) -> str:
    """Run sbatch with ``arguments`` and return the number of the job, or of the array.

    Raises:
        LaunchError: The queue refuses, with sbatch's own words.
    """
    done = _run(["sbatch", "--parsable", *arguments], _SUBMIT_S)
    if done.returncode:
        raise LaunchError(f"the queue does not take the job: {done.stderr.strip().replace('sbatch: error: ', '')}")
    return done.stdout.strip().partition(";")[0]


def _run(command: list[str], timeout_s: float = _COMMAND_S) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(command, text=True, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} not found: launcher=slurm works on machines from which SLURM's commands reach a cluster; "
            "launcher=local needs none (tests/launchers/local_cluster.py starts a small one)"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} did not answer within {timeout_s:g} s") from None
