"""Selects the jobs of a sweep that still have to run, and prepares their directories."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException

from common.errors import TrainingError
from conf.words import as_typed
from training.reporting import mask_secrets
from training.reporting.job_record import FAILED, FINISHED, RUNNING, SUPERSEDED, WAITING, Job, read_job, write_job


@dataclass
class Entry:
    """A job that may have to run.

    Attributes:
        job: Its record.
        overrides: Its overrides as Hydra takes them.
        folder: Its directory.
        continues: Whether it resumes from what its directory holds.
        queued: Whether nobody waits for it, so that an earlier attempt may still be queued or running.
    """

    job: Job
    overrides: list[str]
    folder: Path
    continues: bool = False
    queued: bool = False

    def record_failure(self, result: JobReturn) -> None:
        """Records the failure of a job that could not do so itself, such as a killed process."""
        recorded = read_job(self.folder) or self.job
        if recorded.status != FAILED:
            try:
                reason = str(result.return_value)
            except Exception as error:
                reason = str(error) or repr(error)
            write_job(self.folder, recorded.but(status=FAILED, error=reason))


def compose_all(compose: Callable[[list[str]], Any], jobs: Iterable[list[str]], sweep_dir: Path) -> list[Entry]:
    """Composes every job; one that cannot be composed is an entry that has failed.

    Args:
        compose: Returns the configuration of a job's overrides.
        jobs: The overrides of each job, as they were typed.
        sweep_dir: The sweep's directory.

    Returns:
        One entry per job.

    Raises:
        HydraException: If no job can be composed; the mistake is not one job's then.
        OmegaConfBaseException: Likewise.
    """
    entries, first_error = [], None
    for num, overrides in enumerate(jobs):
        job = Job(num, tuple(mask_secrets(as_typed(overrides))))
        try:
            cfg = compose(overrides)
            with open_dict(cfg):
                cfg.hydra.job.num, cfg.hydra.job.id = num, str(num)
            HydraConfig.instance().set_config(cfg)  # the directory's name may refer to it
            continues, queued = cfg.train.resume is not None, not cfg.launcher.get("wait", True)
            entries.append(Entry(job, overrides, sweep_dir / cfg.hydra.sweep.subdir, continues, queued))
        except (HydraException, OmegaConfBaseException) as error:
            first_error = first_error or error
            reasons = filter(None, (error, error.__cause__))
            failed = job.but(status=FAILED, error="\n".join(str(reason).strip() for reason in reasons))
            entries.append(Entry(failed, overrides, sweep_dir / str(num)))
    if first_error is not None and all(entry.job.status == FAILED for entry in entries):
        raise first_error
    return entries


def open_folders(entries: list[Entry], sweep_dir: Path) -> list[Entry]:
    """Records every job in its directory and returns the jobs to run.

    Jobs that an earlier attempt has finished, or that may still be queued or running, are left out. What an unfinished
    job has left is moved to superseded/, unless the job resumes from it.

    Raises:
        SystemExit: If a directory holds another run. Nothing has been changed then.
    """
    before = [read_job(entry.folder) for entry in entries]
    for entry, earlier in zip(entries, before, strict=True):
        _check_folder(entry, earlier, sweep_dir)
    todo = []
    for entry, earlier in zip(entries, before, strict=True):
        if earlier is not None and earlier.status == FINISHED:
            print(f"job {entry.job.num} is finished: {' '.join(entry.job.overrides)}")
            continue
        if earlier is not None and entry.queued and earlier.status in (WAITING, RUNNING):
            print(f"job {entry.job.num} is {earlier.status} (if it was lost, remove {entry.folder} to run it again)")
            continue
        if earlier is not None and not entry.continues:
            _set_aside(entry.folder, sweep_dir)
        entry.folder.mkdir(parents=True, exist_ok=True)
        write_job(entry.folder, entry.job)
        if entry.job.status == FAILED:
            print(f"error: job {entry.job.num}: {entry.job.error}", file=sys.stderr)
        else:
            todo.append(entry)
    return todo


def batches(entries: list[Entry], max_size: int | None) -> Iterator[list[Entry]]:
    """Cuts ``entries`` into batches that a launcher accepts: consecutive numbers, at most ``max_size`` jobs each."""
    for _, run in groupby(enumerate(entries), key=lambda pair: pair[1].job.num - pair[0]):
        batch = [entry for _, entry in run]
        size = max_size or len(batch)
        for start in range(0, len(batch), size):
            yield batch[start : start + size]


def _check_folder(entry: Entry, earlier: Job | None, sweep_dir: Path) -> None:
    if earlier is None and entry.folder.is_dir() and any(entry.folder.iterdir()):
        raise TrainingError(f"{entry.folder} holds another run; choose another hydra.sweep.dir than {sweep_dir}")
    if earlier is not None and not earlier.is_same(entry.job):
        raise TrainingError(
            f"{entry.folder} holds another run ({' '.join(earlier.overrides)}; this job would be "
            f"{' '.join(entry.job.overrides)}); choose another hydra.sweep.dir than {sweep_dir}, or repeat that "
            "sweep's own command to continue it"
        )


def _set_aside(folder: Path, sweep_dir: Path) -> None:
    """Moves ``folder`` to superseded/NAME-1, or the next free number."""
    aside = sweep_dir / SUPERSEDED
    aside.mkdir(exist_ok=True)
    names = (aside / f"{folder.name}-{number}" for number in count(1))
    folder.rename(next(name for name in names if not name.exists()))
