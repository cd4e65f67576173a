"""One job of a sweep."""

from __future__ import annotations

import multiprocessing
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from common.errors import TrainingError, UserError, format_exception
from conf.trust import typed_overrides
from conf.words import hydra_word
from launchers import World
from launchers.stopping import Stopped
from training.app import execute
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
from training.reporting.loggers import sections
from training.reporting.objective import value_for_sweeper

_OWN_SWEEPER = "hydra_plugins.job_sweeper.JobSweeper"  # goes by the jobs' records


def run_job(cfg: Any, hydra: Any, world: World | None) -> float | None:
    """Runs one job of a sweep in processes of its own and records how it ends in job.json.

    A job that fails raises nothing, so that the next ones run; a sweeper of others, such as optuna, is told by an
    exception and decides.

    Args:
        cfg: The composed configuration.
        hydra: Hydra's own section, for the job's number, overrides and directory.
        world: This process's place among processes that exist already; None if the job starts its own.

    Returns:
        The sweep's objective, see ``training.reporting.objective``; None where the job has none.

    Raises:
        KeyboardInterrupt: To end the sweep.
        TrainingError: The job failed, under a sweeper of others.
        Exception: Any error, on ranks other than 0; rank 0 keeps the record.
    """
    folder = Path(hydra.runtime.output_dir)
    if world is not None and world.rank > 0:
        execute(cfg, folder, world)
        return None
    hold(folder)
    _leave_loky()
    job = Job(hydra.job.num, tuple(mask_secrets(typed_overrides(hydra))), RUNNING)
    write_job(folder, job)
    show_as_group(cfg, Path(hydra.sweep.dir), job.num)
    begin = time.monotonic()

    def end(status: str, error: str | None = None) -> None:
        write_job(folder, job.but(status=status, error=error, seconds=time.monotonic() - begin))

    try:
        execute(cfg, folder, world, hydra, isolated=True)
        value = value_for_sweeper(cfg, folder)
    except Stopped as stopped:
        end(INTERRUPTED)
        here = f"train.resume=auto {shlex.quote(f'hydra.sweep.dir={hydra_word(hydra.sweep.dir)}')}"
        raise Stopped(f"job {job.num} {stopped}\nThe sweep goes on with its own command and {here}") from None
    except KeyboardInterrupt:
        end(INTERRUPTED)
        raise
    except Exception as error:
        text = str(error) if isinstance(error, UserError) else format_exception(error, error.__traceback__)
        end(FAILED, text)
        print(f"error: job {job.num}: {text}", file=sys.stderr)
        if hydra.sweeper._target_ != _OWN_SWEEPER:
            raise TrainingError(f"job {job.num}: {text}") from None
        return None
    finally:
        release(folder)
    end(FINISHED)
    return value


def _leave_loky() -> None:
    """Undoes what joblib's workers (hydra/launcher=joblib) do to multiprocessing: no other module knows "loky"."""
    if multiprocessing.get_start_method(allow_none=True) == "loky":
        multiprocessing.set_start_method(None, force=True)


def show_as_group(cfg: Any, sweep_dir: Path, num: int) -> None:
    """Makes the jobs one group in wandb, named after the sweep's directory; each job is named by its own overrides.

    Args:
        cfg: The job's configuration, changed in place; what the user has set stays.
        sweep_dir: The sweep's directory, with the record of every job.
        num: The job's number.
    """
    jobs = [job for _, job in read_jobs(sweep_dir)]
    keys = swept_keys(jobs)
    for section in sections(cfg):
        if "group" not in section:
            continue
        if section.group is None:
            section.group = sweep_dir.absolute().name
        if section.name is None and keys:
            section.name = next(label(job, keys) for job in jobs if job.num == num)[:120]
