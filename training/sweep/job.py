"""One job of a sweep."""

from __future__ import annotations

import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from common.errors import UserError
from conf.trust import typed_overrides
from launchers import World
from launchers.stopping import Stopped
from training.app import execute
from training.config import hydra_word
from training.reporting import mask_secrets
from training.reporting.directory_lock import hold, release
from training.reporting.job_record import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    Job,
    label,
    read_jobs,
    swept_keys,
    write_job,
)


def run_job(cfg: Any, hydra: Any, world: World | None) -> None:
    """Runs one job of a sweep in processes of its own and records how it ends in job.json.

    A job that fails raises nothing, so that the next ones run.

    Args:
        cfg: The composed configuration.
        hydra: Hydra's own section, for the job's number, overrides and directory.
        world: This process's place among processes that exist already; None if the job starts its own.

    Raises:
        KeyboardInterrupt: To end the sweep.
        Exception: Any error, on ranks other than 0; rank 0 keeps the record.
    """
    folder = Path(hydra.runtime.output_dir)
    if world is not None and world.rank > 0:
        execute(cfg, folder, world)
        return
    hold(folder)
    job = Job(hydra.job.num, tuple(mask_secrets(typed_overrides(hydra))), RUNNING)
    write_job(folder, job)
    show_as_group(cfg, Path(hydra.sweep.dir), job.num)
    begin = time.monotonic()

    def end(status: str, error: str | None = None) -> None:
        write_job(folder, job.but(status=status, error=error, seconds=time.monotonic() - begin))

    try:
        execute(cfg, folder, world, isolated=True)
    except Stopped as stopped:
        end(INTERRUPTED)
        here = f"train.resume=auto {shlex.quote(f'hydra.sweep.dir={hydra_word(hydra.sweep.dir)}')}"
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
    finally:
        release(folder)


def show_as_group(cfg: Any, sweep_dir: Path, num: int) -> None:
    """Makes the jobs one group in wandb, named after the sweep's directory; each job is named by its own overrides.

    Args:
        cfg: The job's configuration, changed in place; what the user has set stays.
        sweep_dir: The sweep's directory, with the record of every job.
        num: The job's number.
    """
    if "group" not in cfg.logger:
        return
    if cfg.logger.group is None:
        cfg.logger.group = sweep_dir.absolute().name
    jobs = [job for _, job in read_jobs(sweep_dir)]
    keys = swept_keys(jobs)
    if cfg.logger.name is None and keys:
        cfg.logger.name = next(label(job, keys) for job in jobs if job.num == num)[:120]
