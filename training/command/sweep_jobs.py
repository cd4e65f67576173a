"""The jobs of a sweep: finds those that still have to run, runs one here, and queues them as SLURM job arrays."""

from __future__ import annotations

import logging
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from common.errors import TrainingError, UserError, format_exception
from conf.composition import Composed
from conf.effects import check_effects
from conf.instantiate import add_to_path, to_config, to_dict
from conf.masking import mask_files, mask_secrets
from conf.words import expand_lists, hydra_word
from launchers import Interrupted, World
from launchers.slurm.follow import wait
from launchers.stopping import Stopped
from training.checkpoint.load import after_restart
from training.command.app import execute, plain
from training.command.launch import is_queued, prepared
from training.command.slurm_job import CheckedRun, queue
from training.reporting.job_record import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    WAITING,
    Job,
    label,
    read_job,
    read_jobs,
    swept_keys,
    update_job,
    write_job,
)
from training.reporting.loggers import sections
from training.reporting.metrics import METRICS
from training.reporting.run_directory import check_free, hold, release
from training.studies.sweep.table import value_for_sweeper

_OWN_SWEEPER = "hydra_plugins.sweeps.JobSweeper"  # it reads how a job ended from the job's record


@dataclass
class Entry:
    """A job that may have to run.

    Attributes:
        job: Its record.
        overrides: Its overrides as Hydra takes them.
        folder: Its directory.
        queued: Whether the launcher does not wait for it, so that an earlier attempt may still be queued or running.
    """

    job: Job
    overrides: list[str]
    folder: Path
    queued: bool = False


def sweep(sweeper: Any, arguments: list[str]) -> None:
    """Run all jobs that the overrides ``arguments`` describe and that have not finished, for Hydra's ``sweeper``.

    Raises:
        KeyboardInterrupt: If the user ends the sweep.
    """
    logging.getLogger("hydra._internal.core_plugins.basic_launcher").addFilter(_mask)
    config, sweep_dir = sweeper.config, Path(sweeper.config.hydra.sweep.dir)
    parser = OverridesParser.create(config_loader=sweeper.hydra_context.config_loader)
    overrides = parser.parse_overrides([*sweeper._parse_config(), *arguments])
    entries = compose_all(sweeper, [expand_lists(job) for job in sweeper.split_arguments(overrides, None)[0]])
    todo = open_folders(entries, sweep_dir)
    OmegaConf.save(config, sweep_dir / "multirun.yaml")
    mask_files([sweep_dir / "multirun.yaml"])  # at once: there may be no job left that does
    for batch in batches(todo, sweeper.max_batch_size):
        returned = sweeper.launcher.launch([entry.overrides for entry in batch], batch[0].job.num)
        for entry, result in zip(batch, returned, strict=True):
            try:
                _ = result.return_value
            except Exception as error:  # the job could not record it, for instance because it was killed
                update_job(entry.folder, status=FAILED, error=str(error) or repr(error))


def _problem_of(cfg: DictConfig) -> str | None:
    """Return what is wrong with the metrics that a job names, which is then known before the first job starts."""
    if all(one is None for one in (cfg.train.monitor, cfg.sweep.objective, cfg.callbacks)):
        return None
    from training.run.checks.model import check_names
    from training.run.prepare import model_and_data

    run = to_config(to_dict(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])))
    add_to_path(run.import_from or ())
    try:
        run, chain, data = model_and_data(run)
    except UserError:
        return None  # the job says so
    try:
        return check_names(run, chain, data)
    except UserError as error:
        return str(error)


def _mask(record: logging.LogRecord) -> bool:
    """Mask secrets in Hydra's log lines, which print each job with its overrides."""
    record.msg, record.args = mask_secrets(record.getMessage()), ()
    return True


def compose_all(sweeper: Any, jobs: Iterable[list[str]]) -> list[Entry]:
    """Compose every job of Hydra's ``sweeper``. A job that cannot be composed becomes an entry that has failed.

    Raises:
        HydraException: No job can be composed, so that the mistake is not that of one job.
        OmegaConfBaseException: The same.
        UserError: The same.
    """
    loader, config = sweeper.hydra_context.config_loader, sweeper.config
    sweep_dir = Path(config.hydra.sweep.dir)
    entries, errors, problems = [], [], {}
    for num, overrides in enumerate(jobs):
        job = Job(num, tuple(mask_secrets(overrides)))
        try:
            cfg = loader.load_sweep_config(config, overrides)
            check_effects(cfg, overrides, of_sweep=True)
            of = str([cfg.train.monitor, cfg.train.monitor_direction, cfg.sweep, cfg.callbacks, cfg.model, cfg.data])
            if of not in problems:
                problems[of] = _problem_of(cfg)
            if problems[of] is not None:
                raise HydraException(problems[of])
            with open_dict(cfg):
                cfg.hydra.job.num, cfg.hydra.job.id = num, str(num)
            HydraConfig.instance().set_config(cfg)  # the directory's name may refer to Hydra's section
            folder, queued = sweep_dir / cfg.hydra.sweep.subdir, not cfg.launcher.get("wait", True)
            entries.append(Entry(job, overrides, folder, queued))
        except (HydraException, OmegaConfBaseException, UserError) as error:
            errors.append(error)
            reason = "\n".join(str(error).strip() for error in (error, error.__cause__) if error is not None)
            entries.append(Entry(replace(job, status=FAILED, error=reason), overrides, sweep_dir / str(num)))
    if len(errors) == len(entries):
        raise errors[0]
    return entries


def open_folders(entries: list[Entry], sweep_dir: Path) -> list[Entry]:
    """Record every job in its directory and return the jobs to run.

    Jobs that an earlier attempt has finished, or that may still be queued or running, are left out.

    Raises:
        TrainingError: A directory has another run, or several jobs. Nothing has been changed then.
    """
    folders = [entry.folder for entry in entries]
    if shared := [folder for folder in folders if folders.count(folder) > 1]:
        raise TrainingError(
            f"{folders.count(shared[0])} jobs have the directory {shared[0]}; let hydra.sweep.subdir differ, as "
            "'${hydra.job.num}' does"
        )
    before = [read_job(folder) for folder in folders]
    for entry, earlier in zip(entries, before, strict=True):
        used = entry.folder.is_dir() and any(entry.folder.iterdir())
        if earlier is not None and earlier.status == FAILED and not (entry.folder / METRICS).exists():
            used = False  # it failed before its first step: the mended command may have the folder
        if used and (earlier is None or not earlier.is_same(entry.job)):
            known = f" ({' '.join(earlier.overrides)})" if earlier is not None else ""
            raise TrainingError(
                f"{entry.folder} holds another run{known} than {' '.join(entry.job.overrides)}; choose another "
                f"hydra.sweep.dir than {sweep_dir}, or repeat that sweep's own command to continue it"
            )
    todo = []
    for entry, earlier in zip(entries, before, strict=True):
        status = None if earlier is None else earlier.status
        if status == FINISHED:
            print(f"job {entry.job.num} is finished: {' '.join(entry.job.overrides)}")
            continue
        if entry.queued and status in (WAITING, RUNNING):
            print(f"job {entry.job.num} is {status} (if it was lost, remove {entry.folder} to run it again)")
            continue
        entry.folder.mkdir(parents=True, exist_ok=True)
        write_job(entry.folder, entry.job)
        if entry.job.status == FAILED:
            print(f"error: job {entry.job.num}: {entry.job.error}", file=sys.stderr)
        else:
            todo.append(entry)
    return todo


def batches(entries: list[Entry], max_size: int | None) -> Iterator[list[Entry]]:
    """Cut ``entries`` into batches that a launcher accepts: consecutive numbers, at most ``max_size`` jobs each."""
    for _, run in groupby(enumerate(entries), key=lambda pair: pair[1].job.num - pair[0]):
        batch = [entry for _, entry in run]
        size = max_size or len(batch)
        for start in range(0, len(batch), size):
            yield batch[start : start + size]


def run_job(composed: Composed, world: World | None) -> Any:
    """Run one job of a sweep in separate processes, and record in job.json how it ends.

    A job that fails raises nothing, so that the next jobs run. Only a third-party sweeper, such as optuna, gets an
    exception and decides. A job that is to be queued is only checked here: ``queue_checked`` queues it.

    Args:
        composed: The job's configuration.
        world: Which of the existing ranks this process is; None if the job starts its ranks.

    Returns:
        The sweep's objective (see ``training.studies.sweep.table.objective``); None if the job has none. For a job that
        is to be queued, the checked run; None if it cannot run.

    Raises:
        KeyboardInterrupt: The user has ended the sweep.
        TrainingError: The job failed under a third-party sweeper.
    """
    if is_queued(composed.cfg, world):
        return _check(composed)
    folder, hydra = composed.run_dir, composed.job
    hold(folder)
    if multiprocessing.get_start_method(allow_none=True) == "loky":  # of hydra/launcher=joblib; torch does not know it
        multiprocessing.set_start_method(None, force=True)
    _begin(composed, RUNNING)
    begin = time.monotonic()

    def end(status: str, error: str | None = None) -> None:
        update_job(folder, status=status, error=error, seconds=time.monotonic() - begin)

    try:
        execute(composed, world, isolated=True)
        value = value_for_sweeper(composed.cfg, folder)
    except Stopped as stopped:
        end(INTERRUPTED)
        here = shlex.quote(f"hydra.sweep.dir={hydra_word(hydra.sweep.dir)}")
        again = f"\nContinue the sweep with its command and {here}" * (hydra.sweeper._target_ == _OWN_SWEEPER)
        raise Stopped(f"job {hydra.job.num} {stopped}{again}") from None
    except KeyboardInterrupt:
        end(INTERRUPTED)
        raise
    except Exception as error:
        text = str(error) if isinstance(error, UserError) else format_exception(error, error.__traceback__)
        end(FAILED, text)
        print(f"error: job {hydra.job.num}: {text}", file=sys.stderr)
        if hydra.sweeper._target_ != _OWN_SWEEPER:
            raise TrainingError(f"job {hydra.job.num}: {text}") from None
        return None
    finally:
        release(folder)
    end(FINISHED)
    return value


def _begin(composed: Composed, status: str) -> None:
    """Record a job, and set in its configuration the checkpoint to resume from and its group and name in wandb."""
    cfg, folder, sweep_dir = composed.cfg, composed.run_dir, Path(composed.job.sweep.dir)
    job, earlier = Job(composed.job.job.num, tuple(mask_secrets([*composed.typed])), status), read_job(folder)
    unfinished = earlier is not None and earlier.is_same(job) and earlier.status != FINISHED
    if unfinished and to_dict(cfg)["mode"] == "train" and (folder / METRICS).exists():
        cfg.train.resume = after_restart(cfg, folder).get("train.resume", cfg.train.resume)
    elif not unfinished:
        check_free(folder, cfg)
    write_job(folder, job)
    jobs = [record for _, record in read_jobs(sweep_dir)]
    keys = swept_keys(jobs)
    for section in sections(cfg).values():
        if "group" in section:
            section.group = section.group or sweep_dir.absolute().name
            section.name = section.name or (label(job, keys)[:120] if keys else None)


def queue_checked(jobs: Sequence[JobReturn]) -> Sequence[JobReturn]:
    """Queue the jobs that passed ``run_job``'s checks, as one array per shape, and wait for them.

    A job that fails is recorded in its directory and does not end the others.
    """
    ready = [job for job in jobs if job.return_value is not None]
    _run_all([job.return_value for job in ready])
    for job in ready:
        run = job.return_value
        record = read_job(run.run_dir)
        finished = record is not None and record.status == FINISHED
        job.return_value = value_for_sweeper(run.cfg, run.run_dir) if finished else None
    return jobs


def _check(composed: Composed) -> CheckedRun | None:
    """Record a job that is to be queued and check it. Return the checked run; None if it cannot run."""
    folder = composed.run_dir
    _begin(composed, WAITING)
    try:
        return CheckedRun.of(prepared(plain(composed), folder, None, composed.words()), folder)
    except UserError as error:
        _fail(folder, error)
        return None


def _run_all(runs: list[CheckedRun]) -> None:
    """Queue ``runs``, those of equal shape as one array. With launcher.wait, return when all have ended.

    Raises:
        Interrupted: On SIGINT, SIGTERM or SIGHUP, after unfinished jobs were cancelled.
        LaunchError: The queue does not answer. Unfinished jobs are cancelled if that is possible.
    """
    jobs = []
    by_shape = groupby(sorted(runs, key=lambda run: run.shape), key=lambda run: run.shape)
    for alike in (list(group) for _, group in by_shape):
        folder = alike[0].run_dir.parent / f"slurm-{alike[0].run_dir.name}"
        try:
            queued = queue(alike, folder, alike[0].cfg.model.name)
        except UserError as error:
            for run in alike:
                _fail(run.run_dir, error)
            continue
        jobs += [(job, run.run_dir) for job, run in zip(queued, alike, strict=True)]
        print(f"job{'s' * (len(queued) > 1)} {', '.join(job.id for job in queued)} queued; their output: {folder}")
    if not jobs or not runs[0].cfg.launcher.wait:
        return
    try:
        wait([job for job, _ in jobs], runs[0].cfg.launcher.poll_s, partial(print, flush=True))
    except Interrupted:
        for job, folder in jobs:
            if not job.done:
                update_job(folder, status=INTERRUPTED)
        raise
    finally:
        for job, folder in jobs:
            if job.error is not None:
                _fail(folder, job.error)


def _fail(folder: Path, error: Exception) -> None:
    update_job(folder, status=FAILED, error=str(error))
    print(f"error: {folder.name}: {error}", file=sys.stderr)
