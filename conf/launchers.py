"""The schemas of the options of ``launcher=``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Local:
    """Processes of this machine."""

    name: str = "local"
    max_restarts: int = 0  # how often a run resumes by itself after a process has died
    allow_mixed: bool = False  # warn, instead of refusing, where ranks differ in code, versions or data


@dataclass
class Slurm:
    """A job of a SLURM cluster."""

    name: str = "slurm"
    nodes: int = 1
    tasks_per_node: int | None = None  # processes of each node; null: dp x pp, divided by the nodes
    cpus_per_task: int | None = None  # cores of each process; null: the cluster's own rule
    mem_gb: float | None = None  # memory of each node; null: the cluster's own rule
    gpus_per_node: int | None = None  # null on a cluster without GPUs
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_min: int = 60  # the job's time limit; at its end the job saves, is queued again and resumes
    signal_s: int = 120  # how long before the limit it is told to save; SLURM may be up to 60 s early
    max_requeues: int = 100  # how often a job may be queued again after a time limit
    setup: list[str] = field(default_factory=list)  # shell lines before the run, such as ["module load cuda"]
    sbatch: Any = None  # further parameters of sbatch, such as {constraint: a100}
    wait: bool = True  # false: print the job's number and return at once
    max_parallel: int | None = None  # jobs of a sweep that run at the same time; null: all
    poll_s: float = 2.0  # seconds between two queries of the queue
    allow_mixed: bool = False  # warn, instead of refusing, where ranks differ in code, versions or data
