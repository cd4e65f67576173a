"""One job of a sweep."""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from typing import Any

from common.errors import UserError
from launchers import World
from launchers.stopping import Stopped
from training.app import execute
from training.reporting import mask_secrets
from training.sweep.record import FAILED, FINISHED, INTERRUPTED, RUNNING, Job, label, read_jobs, swept_keys, write_job


def run_job(cfg: Any, hydra: Any, world: World | None) -> None:
    """Run the composed ``cfg`` in processes of its own and record how it ends.

    hydra   Hydra's own section, for the job's number, overrides and directory
    raises  KeyboardInterrupt, to end the sweep. A job that fails raises nothing, so that the next ones run; on a rank
            other than 0 of a job whose processes exist already everything is raised, as rank 0 keeps the record.
    """
    folder = Path(hydra.runtime.output_dir)
    if world is not None and world.rank > 0:
        execute(cfg, folder, world)
        return
    job = Job(hydra.job.num, tuple(mask_secrets(list(hydra.overrides.task))), RUNNING)
    write_job(folder, job)
    show_as_group(cfg, Path(hydra.sweep.dir), job.num)
    begin = time.monotonic()

    def end(status: str, error: str | None = None) -> None:
        write_job(folder, job.but(status=status, error=error, seconds=time.monotonic() - begin))

    try:
        execute(cfg, folder, world, isolated=True)
    except Stopped as stopped:
        end(INTERRUPTED)
        here = f"train.resume=auto hydra.sweep.dir={hydra.sweep.dir}"
        raise Stopped(f"job {job.num} {stopped}\nThe sweep goes on with its own command and {here}") from None
    except KeyboardInterrupt:
        end(INTERRUPTED)
        raise
    except Exception as error:
        text = str(error) if isinstance(error, UserError) else traceback.format_exc()
        end(FAILED, text)
        print(f"error: job {job.num}: {text}", file=sys.stderr)
    else:
        end(FINISHED)


def show_as_group(cfg: Any, sweep_dir: Path, num: int) -> None:
    """In wandb the jobs are one group, named after the sweep's directory, and each is named by what is its own.

    Job ``num`` has its record already.
    """
    if "group" not in cfg.logger:
        return
    if cfg.logger.group is None:
        cfg.logger.group = sweep_dir.absolute().name
    jobs = [job for _, job in read_jobs(sweep_dir)]
    keys = swept_keys(jobs)
    if cfg.logger.name is None and keys:
        cfg.logger.name = next(label(job, keys) for job in jobs if job.num == num)[:120]
