"""Which jobs of a sweep are still to run, and in what directories."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException

from training.guard import refuse
from training.reporting import mask_secrets
from training.sweep.record import FAILED, FINISHED, RUNNING, SUPERSEDED, WAITING, Job, read_job, write_job


@dataclass
class Entry:
    """A job to be, with its ``overrides`` as they were typed.

    ``continues`` where it may go on from what lies in ``folder``; ``queued`` where an earlier attempt at it may still
    be on its way, as nobody waits for it.
    """

    job: Job
    overrides: list[str]
    folder: Path
    continues: bool = False
    queued: bool = False

    def note_loss(self, result: JobReturn) -> None:
        """Record a job that could not do so itself: a machine that went away, a process that was killed."""
        recorded = read_job(self.folder) or self.job
        if recorded.status != FAILED:
            try:
                reason = str(result.return_value)
            except Exception as error:
                reason = str(error) or repr(error)
            write_job(self.folder, recorded.but(status=FAILED, error=reason))


def compose_all(compose: Callable[[list[str]], Any], jobs: Iterable[list[str]], sweep_dir: Path) -> list[Entry]:
    """An entry for each job's overrides; one that cannot be composed has failed already.

    Raises what Hydra raises where none of them can: then it is no matter of a single job.
    """
    entries, first_error = [], None
    for num, overrides in enumerate(jobs):
        job = Job(num, tuple(mask_secrets(overrides)))
        try:
            cfg = compose(overrides)
            with open_dict(cfg):
                cfg.hydra.job.num, cfg.hydra.job.id = num, str(num)
            HydraConfig.instance().set_config(cfg)  # a directory's name may refer to it
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
    """Record every job in its directory; returns those to run.

    A job that an earlier attempt has finished, or that is on its way, is left out. What an unfinished one has left
    is set aside, unless the job goes on from it. A directory that holds anything else ends the program before
    anything is touched.
    """
    before = [read_job(entry.folder) for entry in entries]
    for entry, earlier in zip(entries, before, strict=True):
        _check(entry, earlier, sweep_dir)
    todo = []
    for entry, earlier in zip(entries, before, strict=True):
        if earlier is not None and earlier.status == FINISHED:
            print(f"job {entry.job.num} is finished: {' '.join(entry.overrides)}")
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


def consecutive(entries: list[Entry], at_most: int | None) -> Iterator[list[Entry]]:
    """``entries`` in runs whose numbers have no gaps, of at most so many each: what a launcher can be given."""
    for _, run in groupby(enumerate(entries), key=lambda pair: pair[1].job.num - pair[0]):
        found = [entry for _, entry in run]
        step = at_most or len(found)
        for start in range(0, len(found), step):
            yield found[start : start + step]


def _check(entry: Entry, earlier: Job | None, sweep_dir: Path) -> None:
    if earlier is None and entry.folder.is_dir() and any(entry.folder.iterdir()):
        refuse(f"{entry.folder} holds another run; choose another hydra.sweep.dir than {sweep_dir}")
    if earlier is not None and not earlier.is_same(entry.job):
        refuse(
            f"{entry.folder} holds another run ({' '.join(earlier.overrides)}; here it would be "
            f"{' '.join(entry.job.overrides)}); choose another hydra.sweep.dir than {sweep_dir}, or repeat that "
            "sweep's own command to go on with it"
        )


def _set_aside(folder: Path, sweep_dir: Path) -> None:
    """Move what lies in ``folder`` to superseded/NAME-1, -2, …"""
    aside = sweep_dir / SUPERSEDED
    aside.mkdir(exist_ok=True)
    count = 1
    while (aside / f"{folder.name}-{count}").exists():
        count += 1
    folder.rename(aside / f"{folder.name}-{count}")
