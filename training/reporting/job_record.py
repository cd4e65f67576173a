"""`job.json`: what one job of a sweep is and how it ended."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from common.files import parse_json, read_regular
from training.reporting.metrics import write_json

JOB = "job.json"
SUPERSEDED = "superseded"  # the folder, beside the jobs, of what earlier attempts at them have left

WAITING, RUNNING, FINISHED, FAILED, INTERRUPTED = "waiting", "running", "finished", "failed", "interrupted"


@dataclass(frozen=True)
class Job:
    """``overrides`` as on the command line, one value each, secrets masked; ``seconds`` from its start to its end.

    ``error`` is the whole text: a message that a user can act on, or a traceback.
    """

    num: int
    overrides: tuple[str, ...]
    status: str = WAITING
    error: str | None = None
    seconds: float | None = None

    def but(self, **changes) -> Job:
        """Return the record with ``changes``."""
        return replace(self, **changes)

    def is_same(self, other: Job) -> bool:
        """Whether both are the same work; where it goes on from does not count."""
        return _work(self.overrides) == _work(other.overrides)


def write_job(folder: Path, job: Job) -> None:
    """Write the record of the job in ``folder``."""
    write_json(folder / JOB, asdict(job))


def update_job(folder: Path, **changes) -> None:
    """Change the record in ``folder``; nothing where there is none."""
    if (job := read_job(folder)) is not None:
        write_job(folder, job.but(**changes))


def read_job(folder: Path) -> Job | None:
    """The record in ``folder``; None where there is none that can be read."""
    try:
        found = parse_json(read_regular(folder / JOB))
        return Job(**{**found, "overrides": tuple(found["overrides"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_jobs(folder: Path) -> list[tuple[Path, Job]]:
    """Every job below the sweep directory ``folder`` with its directory, by number."""
    found = []
    for path, names, files in os.walk(folder):
        if JOB in files and (job := read_job(Path(path))) is not None:
            names.clear()  # a run's checkpoints and logs hold no jobs
            found.append((Path(path), job))
        elif SUPERSEDED in names:
            names.remove(SUPERSEDED)
    return sorted(found, key=lambda pair: pair[1].num)


def values(job: Job) -> dict[str, str]:
    """The overrides by key: {"parallel.chunks": "4"}."""
    pairs = (override.partition("=") for override in job.overrides)
    return {key.lstrip("+"): value for key, _, value in pairs}


def swept_keys(jobs: list[Job]) -> list[str]:
    """The keys whose values are not the same in all ``jobs``, in their order."""
    tables = [values(job) for job in jobs]
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if len({table.get(key) for table in tables}) > 1]


def label(job: Job, keys: list[str]) -> str:
    """What tells this job from the others: "parallel.chunks=4"."""
    table = values(job)
    return " ".join(f"{key}={short(table[key])}" for key in keys if key in table) or f"job {job.num}"


def short(value: str) -> str:
    """A value for the eye: a number of many digits, as a sweeper draws them, with six."""
    return f"{float(value):.6g}" if re.fullmatch(r"-?\d*\.\d{7,}(e-?\d+)?", value) else value


def _work(overrides: tuple[str, ...]) -> list[str]:
    return [override for override in overrides if not override.startswith("train.resume=")]
