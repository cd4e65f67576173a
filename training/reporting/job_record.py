"""`job.json`: the record of one job of a sweep, with its overrides and how it ended."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from training.reporting.metrics import write_json

JOB = "job.json"

Status = Literal["waiting", "running", "finished", "failed", "interrupted"]


@dataclass(frozen=True)
class Job:
    """The record of a job.

    Attributes:
        num: The job's number.
        overrides: The words of its command line, one value each, with secrets masked.
        status: The state of the job.
        error: The text of its error: a message for the user, or a traceback.
        seconds: The time from its start to its end.
    """

    num: int
    overrides: tuple[str, ...]
    status: Status = "waiting"
    error: str | None = None
    seconds: float | None = None

    def is_same(self, other: Job) -> bool:
        """Return whether both jobs have the same overrides, ignoring ``train.resume``."""
        ours, theirs = ([word for word in job.overrides if word[:13] != "train.resume="] for job in (self, other))
        return ours == theirs


def write_job(folder: Path, job: Job) -> None:
    """Write the record of the job in ``folder``."""
    write_json(folder / JOB, asdict(job))


def update_job(folder: Path, status: Status, **changes: Any) -> None:
    """Change the record in ``folder``. Does nothing if there is no record."""
    if (job := read_job(folder)) is not None:
        write_job(folder, replace(job, status=status, **changes))


def read_job(folder: Path) -> Job | None:
    """Return the record in ``folder``; None if there is none or it cannot be read."""
    try:
        found = json.loads((folder / JOB).read_bytes())
        return Job(**{**found, "overrides": tuple(found["overrides"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_jobs(folder: Path) -> list[tuple[Path, Job]]:
    """Return every job below the sweep directory ``folder`` with its directory, by number."""
    found = []
    for path, names, files in os.walk(folder):
        if JOB in files and (job := read_job(Path(path))) is not None:
            found.append((Path(path), job))
            names.clear()  # a run's checkpoints and logs contain no jobs
    return sorted(found, key=lambda pair: pair[1].num)


def values(job: Job) -> dict[str, str]:
    """Return the overrides by key: {"parallel.chunks": "4"}."""
    pairs = (override.partition("=") for override in job.overrides)
    return {key.lstrip("+"): value for key, _, value in pairs}


def swept_keys(jobs: list[Job]) -> list[str]:
    """Return the keys with different values in ``jobs``, in their order."""
    tables = [values(job) for job in jobs]
    keys = dict.fromkeys(key for table in tables for key in table)
    # train.resume=auto is not swept: the unfinished jobs of an interrupted sweep have it, the finished ones do not.
    different = {key: {table.get(key) for table in tables} for key in keys}
    return [key for key, found in different.items() if len(found) > 1 and found != {None, "auto"}]


def label(job: Job, keys: list[str]) -> str:
    """Return the words that distinguish a job, such as "parallel.chunks=4"."""
    table = values(job)
    return " ".join(f"{key}={short(table[key])}" for key in keys if key in table) or f"job {job.num}"


def short(value: str) -> str:
    """Return a value in short form: numbers with more than six decimals are rounded to six digits."""
    return f"{float(value):.6g}" if re.fullmatch(r"-?\d*\.\d{7,}(e-?\d+)?", value) else value
