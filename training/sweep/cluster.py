"""A sweep's jobs on a SLURM cluster."""

from __future__ import annotations

import sys
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from common.errors import UserError
from conf.instantiate import open_doors, to_config, to_dict
from conf.trust import typed_overrides
from launchers import Interrupted
from launchers.slurm.follow import wait
from launchers.slurm.submit import Job as SlurmJob
from training.autotune import choose_chunks, recall
from training.reporting import mask_secrets
from training.reporting.job_record import FAILED, FINISHED, INTERRUPTED, WAITING, Job, read_job, update_job, write_job
from training.reporting.objective import value_for_sweeper
from training.slurm_job import Ready, prepare_here, queue
from training.sweep.job import show_as_group


def check(cfg: Any) -> Ready | None:
    """Record the composed job and check it without running it.

    Returns:
        The checked run; None where it cannot run, which is recorded too.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    write_job(folder, Job(hydra.job.num, tuple(mask_secrets(typed_overrides(hydra))), WAITING))
    show_as_group(cfg, Path(hydra.sweep.dir), hydra.job.num)
    try:
        cfg = to_config(to_dict(cfg))
        open_doors(cfg)
        recall(cfg, folder)
        choose_chunks(cfg, folder, None)
        return Ready.of(prepare_here(cfg), folder)
    except UserError as error:
        _fail(folder, error)
        return None


def run_all(runs: list[Ready]) -> None:
    """Queue ``runs``, those of one shape as one array; with launcher.wait, return when all have ended.

    Raises:
        Interrupted: On SIGINT, SIGTERM or SIGHUP, after what had not finished was cancelled.
        LaunchError: The queue does not answer. What has not finished is cancelled, if that is possible.
    """
    jobs: list[tuple[SlurmJob, Path]] = []
    by_shape = groupby(sorted(runs, key=lambda run: run.shape), key=lambda run: run.shape)
    for alike in (list(group) for _, group in by_shape):
        folder = alike[0].run_dir.parent / f"slurm-{alike[0].run_dir.name}"
        try:
            queued = queue(alike, folder, alike[0].tree["model"]["name"])
        except UserError as error:
            for run in alike:
                _fail(run.run_dir, error)
            continue
        jobs += [(job, run.run_dir) for job, run in zip(queued, alike, strict=True)]
        print(f"job{'s' * (len(queued) > 1)} {', '.join(job.id for job in queued)} queued; their output: {folder}")
    launcher = runs[0].tree["launcher"] if runs else None
    if not jobs or not launcher["wait"]:
        return
    try:
        wait([job for job, _ in jobs], launcher["poll_s"], partial(print, flush=True))
    except Interrupted:
        for job, folder in jobs:
            if not job.done:
                update_job(folder, status=INTERRUPTED)
        raise
    finally:
        for job, folder in jobs:
            if job.error is not None:
                _fail(folder, job.error)


def objective_of(run: Ready) -> float | None:
    """Return what a job that has ended tells a sweeper that chooses the next ones; None where it has no result."""
    job = read_job(run.run_dir)
    return value_for_sweeper(to_config(run.tree), run.run_dir) if job is not None and job.status == FINISHED else None


def _fail(folder: Path, error: Exception) -> None:
    update_job(folder, status=FAILED, error=str(error))
    print(f"error: {folder.name}: {error}", file=sys.stderr)
