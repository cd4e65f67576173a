"""A sweep's jobs on a SLURM cluster."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from common.errors import UserError
from launchers import Interrupted
from launchers.slurm import wait
from training.autotune import recall, settle_chunks
from training.config import to_config, to_dict
from training.reporting import mask_secrets
from training.slurm_job import Ready, note, prepare_here, queue, ready
from training.sweep.job import show_as_group
from training.sweep.record import FAILED, INTERRUPTED, WAITING, Job, write_job


def check(cfg: Any) -> Ready | None:
    """Record the composed job and check it, without running it; None where it cannot run, which is recorded too."""
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    write_job(folder, Job(hydra.job.num, tuple(mask_secrets(list(hydra.overrides.task))), WAITING))
    show_as_group(cfg, Path(hydra.sweep.dir), hydra.job.num)
    try:
        cfg = to_config(to_dict(cfg))
        recall(cfg, folder)
        settle_chunks(cfg, folder, None)
        return ready(prepare_here(cfg), folder)
    except UserError as error:
        _fail(folder, error)
        return None


def run_all(runs: list[Ready]) -> None:
    """Queue ``runs``, those of one shape as one array; with launcher.wait, return when all have ended.

    Raises KeyboardInterrupt, and LaunchError when the queue does not answer; what is not finished is cancelled then.
    """
    jobs = {}
    for index, (_, alike) in enumerate(groupby(sorted(runs, key=lambda run: run.shape), key=lambda run: run.shape)):
        alike = list(alike)
        folder = alike[0].run_dir.parent / f"slurm-{index}"
        try:
            queued = queue(alike, folder, alike[0].tree["model"]["name"])
        except UserError as error:
            for run in alike:
                _fail(run.run_dir, error)
            continue
        jobs.update((job.id, (job, run.run_dir)) for job, run in zip(queued, alike, strict=True))
        print(f"job{'s' * (len(queued) > 1)} {', '.join(job.id for job in queued)} queued; their output: {folder}")
    launcher = runs[0].tree["launcher"] if runs else None
    if not jobs or not launcher["wait"]:
        return
    try:
        wait([job for job, _ in jobs.values()], launcher["poll_s"], lambda line: print(line, flush=True))
    except Interrupted:
        for job, folder in jobs.values():
            if not job.done:
                note(folder, status=INTERRUPTED)
        raise
    finally:
        for job, folder in jobs.values():
            if job.error is not None:
                _fail(folder, job.error)


def _fail(folder: Path, error: Exception) -> None:
    note(folder, status=FAILED, error=str(error))
    print(f"error: {folder.name}: {error}", file=sys.stderr)
