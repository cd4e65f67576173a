"""The jobs of a sweep: finds the jobs that still have to run, runs a job here, or queues jobs as SLURM arrays."""

from __future__ import annotations

import logging
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import TrainingError, UserError, format_exception
from conf.composition import Composed, pop_hydra
from conf.effects import check_effects
from conf.instantiate import to_dict
from conf.masking import mask_files, mask_secrets
from conf.messages import explain, nearest
from conf.schema import REPEAT
from conf.words import expand_lists, hydra_word, key_of
from launchers import Interrupted
from launchers.slurm.follow import wait
from launchers.stopping import Stopped
from training.checkpoint.load import after_restart
from training.command.app import execute, plain
from training.command.launch import is_queued, prepared
from training.command.slurm_job import CheckedRun, queue
from training.reporting.job_record import Job, Status, label, read_job, read_jobs, swept_keys, update_job, write_job
from training.reporting.loggers import sections
from training.reporting.metrics import METRICS
from training.reporting.run_directory import check_free, hold, release
from training.studies.sweep.table import is_repeated, value_for_sweeper

_OWN_SWEEPER = "hydra_plugins.sweeps.JobSweeper"  # it reads how a job ended from the job's record


@dataclass
class Entry:
    """A job of a sweep.

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
        TrainingError: A job cannot be composed, or its directory has another run. No job has started then.
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
                update_job(entry.folder, status="failed", error=str(error) or repr(error))


def _mask(record: logging.LogRecord) -> bool:
    """Mask secrets in Hydra's log lines, which print each job with its overrides."""
    record.msg, record.args = mask_secrets(record.getMessage()), ()
    return True


def compose_all(sweeper: Any, jobs: Iterable[list[str]]) -> list[Entry]:
    """Compose every job of Hydra's ``sweeper``, and check its keys and its metrics.

    Raises:
        TrainingError: A job is wrong. The message names its words and the reason.
    """
    entries, checked = [], set()
    for num, overrides in enumerate(jobs):
        job = Job(num, tuple(mask_secrets(overrides)))
        try:
            cfg = sweeper.hydra_context.config_loader.load_sweep_config(sweeper.config, overrides)
            check_effects(cfg, overrides, of_sweep=True)
            cfg.hydra.job.update(num=num, id=str(num))
            HydraConfig.instance().set_config(cfg)  # the directory's name may refer to Hydra's section
            folder = Path(sweeper.config.hydra.sweep.dir, cfg.hydra.sweep.subdir)
            entries.append(Entry(job, overrides, folder, not cfg.launcher.get("wait", True)))
            of = str([cfg.train.monitor, cfg.train.monitor_direction, cfg.sweep, cfg.callbacks, cfg.model, cfg.data])
            if of not in checked:
                _check_metrics(cfg, folder)
                checked.add(of)
        except (HydraException, OmegaConfBaseException, UserError) as error:
            raise TrainingError(f"job {num} ({' '.join(job.overrides)}): {explain(error)}") from None
    typed = sorted({key_of(word) for entry in entries for word in entry.job.overrides})
    for key in {*sweeper.config.sweep.repeat} - {*REPEAT, "data.fold"}:
        if not any(is_repeated(name, [key]) for name in typed):
            raise TrainingError(f"sweep.repeat: no job has the key {key}{nearest('{}', key, typed)}")
    return entries


def _check_metrics(cfg: DictConfig, folder: Path) -> None:
    if cfg.train.monitor is None and cfg.sweep.objective is None and cfg.callbacks is None:
        return
    from training.run.checks.model import check_names
    from training.run.prepare import model_and_data

    pop_hydra(cfg)
    check_names(*model_and_data(plain(Composed(cfg, folder)).cfg))


def open_folders(entries: list[Entry], sweep_dir: Path) -> list[Entry]:
    """Record every job in its directory and return the jobs to run.

    A job that an earlier attempt has finished, or that may still be queued or running, is left out.

    Raises:
        TrainingError: A directory has another run, or several jobs. Nothing has been changed then.
    """
    folders = [entry.folder for entry in entries]
    if shared := [folder for folder in folders if folders.count(folder) > 1]:
        raise TrainingError(
            f"{folders.count(shared[0])} jobs have the directory {shared[0]}; let hydra.sweep.subdir differ, as "
            "'${hydra.job.num}' does"
        )
    todo = []
    for entry in entries:
        earlier, overrides = read_job(entry.folder), " ".join(entry.job.overrides)
        used = entry.folder.is_dir() and any(entry.folder.iterdir())
        if earlier is not None and earlier.status == "failed" and not (entry.folder / METRICS).exists():
            used = False  # it failed before its first step: the mended command may have the folder
        if used and (earlier is None or not earlier.is_same(entry.job)):
            known = f" ({' '.join(earlier.overrides)})" if earlier is not None else ""
            raise TrainingError(
                f"{entry.folder} holds another run{known} than {overrides}; choose another hydra.sweep.dir than "
                f"{sweep_dir}, or repeat that sweep's own command to continue it"
            )
        if earlier is not None and earlier.status == "finished":
            print(f"job {entry.job.num} is finished: {overrides}")
        elif entry.queued and earlier is not None and earlier.status in ("waiting", "running"):
            lost = f"if it was lost, remove {entry.folder} to run it again"
            print(f"job {entry.job.num} is {earlier.status} ({lost})")
        else:
            todo.append(entry)
    for entry in todo:
        entry.folder.mkdir(parents=True, exist_ok=True)
        write_job(entry.folder, entry.job)
    return todo


def batches(entries: list[Entry], max_size: int | None) -> Iterator[list[Entry]]:
    """Cut ``entries`` into batches for a launcher: consecutive numbers, at most ``max_size`` jobs each."""
    for _, run in groupby(enumerate(entries), key=lambda pair: pair[1].job.num - pair[0]):
        batch = [entry for _, entry in run]
        size = max_size or len(batch)
        for start in range(0, len(batch), size):
            yield batch[start : start + size]


def run_job(composed: Composed) -> Any:
    """Run one job of a sweep in separate processes, and record in job.json how it ends.

    A failed job raises nothing, so that the next jobs run. Only a third-party sweeper, such as optuna, gets an
    exception and decides. A job for the queue is only checked here: ``queue_checked`` queues it.

    Returns:
        The objective of the sweep (see ``training.studies.sweep.table.choose_objective``); None if the job has none.
        For the queue, the checked run; None if it cannot run.

    Raises:
        KeyboardInterrupt: The user has ended the sweep.
        TrainingError: The job failed under a third-party sweeper.
    """
    folder, hydra, queued = composed.run_dir, composed.job, is_queued(composed)
    hold(folder)
    if multiprocessing.get_start_method(allow_none=True) == "loky":  # of hydra/launcher=joblib; torch does not know it
        multiprocessing.set_start_method(None, force=True)
    _begin(composed, "waiting" if queued else "running")
    begin = time.monotonic()

    def end(status: Status, error: str | None = None) -> None:
        update_job(folder, status=status, error=error, seconds=time.monotonic() - begin)

    try:
        if queued:
            setup = prepared(plain(composed))
            return CheckedRun(setup.cfg, folder.absolute(), setup.plan.processes)
        execute(composed)
        value = value_for_sweeper(composed.cfg, folder)
    except KeyboardInterrupt as interrupt:
        end("interrupted")
        if not isinstance(interrupt, Stopped):
            raise
        here = shlex.quote(f"hydra.sweep.dir={hydra_word(hydra.sweep.dir)}")
        again = f"\nContinue the sweep with its command and {here}" * (hydra.sweeper._target_ == _OWN_SWEEPER)
        raise Stopped(f"job {hydra.job.num} {interrupt}{again}") from None
    except Exception as error:
        text = str(error) if isinstance(error, UserError) else format_exception(error, error.__traceback__)
        end("failed", text)
        print(f"error: job {hydra.job.num}: {text}", file=sys.stderr)
        if hydra.sweeper._target_ != _OWN_SWEEPER:
            raise TrainingError(f"job {hydra.job.num}: {text}") from None
        return None
    finally:
        release(folder)
    end("finished")
    return value


def _begin(composed: Composed, status: Status) -> None:
    """Record a job. Set the checkpoint to resume from, and the group and name in wandb, in its configuration."""
    cfg, folder, sweep_dir = composed.cfg, composed.run_dir, Path(composed.job.sweep.dir)
    job, earlier = Job(composed.job.job.num, tuple(mask_secrets([*composed.typed])), status), read_job(folder)
    unfinished = earlier is not None and earlier.is_same(job) and earlier.status != "finished"
    if unfinished and to_dict(cfg)["mode"] == "train" and (folder / METRICS).exists():
        cfg.train.resume = after_restart(cfg, folder).train.resume
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
    """Queue the jobs that passed the checks of ``run_job``, as one array per shape, and wait for them.

    A failed job is recorded in its directory and does not end the other jobs.
    """
    ready = [job for job in jobs if job.status is JobStatus.COMPLETED and job.return_value is not None]
    _run_all([job.return_value for job in ready])
    for job in ready:
        run = job.return_value
        record = read_job(run.run_dir)
        finished = record is not None and record.status == "finished"
        job.return_value = value_for_sweeper(run.cfg, run.run_dir) if finished else None
    return jobs


def _run_all(runs: list[CheckedRun]) -> None:
    """Queue ``runs``, one array for each shape. With launcher.wait, return when all have ended.

    Raises:
        Interrupted: On SIGINT, SIGTERM or SIGHUP, after unfinished jobs were cancelled.
        LaunchError: The queue does not answer. Unfinished jobs are cancelled if possible.
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
                update_job(folder, status="interrupted")
        raise
    finally:
        for job, folder in jobs:
            if job.error is not None:
                _fail(folder, job.error)


def _fail(folder: Path, error: Exception) -> None:
    update_job(folder, status="failed", error=str(error))
    print(f"error: {folder.name}: {error}", file=sys.stderr)
