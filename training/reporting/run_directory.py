"""Checks the run directory before Hydra writes to it: a new run never overwrites another one."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from common.errors import UserError, printable
from common.files import explain, read_yaml
from conf.messages import explain as explain_error
from conf.trust import check_job
from launchers import World
from launchers.world import restarts
from training.reporting import METRICS, SUMMARY, mask_secrets
from training.reporting.directory_lock import EARLIER_ATTEMPT_S, LOCK, hold, release

# Of Linux; the files in it have names and paths of their own.
_LONGEST_NAME, _LONGEST_PATH = 255, 3800

# What runs, jobs and sweeps write, besides Hydra's folder.
WRITTEN = (
    METRICS, SUMMARY, "environment.json", "choices.json", "timeline.png", "timeline.json", "gradients.jsonl",
    "metrics.csv", "mlflow_id.txt", "wandb_id.txt", "train.log", "job.json", "sweep.csv", "sweep.png", "report.html",
    "multirun.yaml", "checkpoints", "logs", "wandb", "tensorboard", "mlruns", "profile", "slurm", "export",
)  # fmt: skip


@contextmanager
def removed_if_unused(folder: Path, subfolder: str | None) -> Iterator[None]:
    """Removes what Hydra wrote into a run directory if the block fails and has left nothing else there.

    The directory itself then goes with its lock.
    """
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if subfolder and set(os.listdir(folder)) <= {subfolder, LOCK}:
                shutil.rmtree(folder / subfolder)
                release(folder)  # and the folders that were made for it
        raise


def refuse(message: str) -> NoReturn:
    """Prints an error and exits with code 1.

    Hydra turns an exception of a callback into a warning, but lets an exit pass.
    """
    print(f"error: {printable(message)}", file=sys.stderr)
    raise SystemExit(1) from UserError(message)


def _refusing(check: Callable[..., None]) -> Callable[..., None]:
    """A method of a callback whose every exception refuses the run: Hydra would warn, and go on without the check."""

    @wraps(check)
    def method(self: Callback, config: DictConfig, **kwargs: Any) -> None:
        try:
            check(self, config, **kwargs)
        except Exception as error:
            refuse(explain_error(error) or f"{type(error).__name__}: {error}")

    return method


class RunDirectoryGuard(Callback):
    """Checks the run directory before Hydra writes its first file there, and masks secrets in the files it writes.

    The directories of a sweep are checked job by job elsewhere.
    """

    @_refusing
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Locks the directory, and refuses one that holds another run or cannot be written."""
        check_job(config, config.hydra)
        folder = Path(config.hydra.run.dir)
        _check_name("hydra.run.dir", folder)
        _stay_inside("hydra.output_subdir", config.hydra.output_subdir)
        _check_links("hydra.run.dir", folder, config.hydra.output_subdir)
        _lock(folder, "hydra.run.dir")
        # Only now: a run that began at the same moment would have been overlooked before.
        if config.train.resume is None and not started_again() and (folder / METRICS).exists():
            release(folder)
            refuse(f"{folder} holds another run; choose another hydra.run.dir, or go on with it by train.resume=auto")

    @_refusing
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Locks the directory; refuses a sweep under torchrun, and names that lead out of the directory."""
        world = World.detect()
        if world is not None and world.size > 1 and world.origin in ("torchrun", "environment"):
            refuse("a sweep starts its jobs' processes itself: run it as python train.py -m …, without torchrun")
        _check_name("hydra.sweep.dir", Path(config.hydra.sweep.dir))
        _stay_inside("hydra.output_subdir", config.hydra.output_subdir)
        # Not resolved: it contains the job's number, which only a job knows.
        _stay_inside("hydra.sweep.subdir", OmegaConf.to_container(config.hydra.sweep, resolve=False)["subdir"])
        folder = Path(config.hydra.sweep.dir)
        for job in (path for path in (folder.iterdir() if folder.is_dir() else ()) if path.is_dir()):
            _check_link("hydra.sweep.dir", folder, job)
            _check_links("hydra.sweep.dir", job, config.hydra.output_subdir)
        _check_links("hydra.sweep.dir", folder, None)
        _lock(folder, "hydra.sweep.dir")

    @_refusing
    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuses what would execute something else, and masks secrets in the files that Hydra has written."""
        check_job(config, config.hydra)
        content = OmegaConf.to_container(config, resolve=False)
        if config.hydra.mode is RunMode.RUN and mask_secrets(content) == content:
            return  # reading the files would take longer than all else here
        folder = Path(config.hydra.runtime.output_dir)
        mask_files([*folder.glob(f"{config.hydra.output_subdir}/*.yaml"), folder.parent / "multirun.yaml"])


def started_again() -> bool:
    """Returns whether this is a rank that torchrun or a queue has started before: its directory is its own."""
    return World.detect() is not None and restarts() > 0


def mask_files(paths: list[Path]) -> None:
    """Masks secrets in YAML files; files without secrets, and those that do not exist, are left alone."""
    for path in filter(Path.exists, paths):
        try:
            content = OmegaConf.to_container(read_yaml(path), resolve=False)
            masked = mask_secrets(content)
            if masked != content:
                OmegaConf.save(OmegaConf.create(masked), path)
        except (OSError, UserError) as error:
            # A secret that cannot be masked must not stay.
            path.unlink(missing_ok=True)
            print(f"warning: {path} could not be written again without its secrets: {error}", file=sys.stderr)


def _check_name(key: str, path: Path) -> None:
    """Refuses a path that no file system takes, or that scripts and consoles would take for more than a path."""
    shown = printable(str(path).encode("unicode_escape").decode())
    if not str(path).isprintable():
        refuse(f"{key}={shown} holds characters that cannot be printed; choose another name")
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > _LONGEST_NAME or len(os.fsencode(path.absolute())) > _LONGEST_PATH:
        refuse(
            f"{key}={shown[:40]}… is too long: a name of {longest} bytes in a path of {len(os.fsencode(path))}; a file "
            f"system takes {_LONGEST_NAME} and {_LONGEST_PATH}. Choose a shorter one"
        )


def _stay_inside(key: str, value: str | None) -> None:
    if value is not None and (Path(value).is_absolute() or ".." in Path(value).parts):
        refuse(f"{key}={value} leads out of the run directory; give a name without .. that does not begin with /")


def _check_links(key: str, folder: Path, subfolder: str | None) -> None:
    """Refuses a directory from others in which what a run writes is a link that leads out of it."""
    for path in (folder / name for name in (*WRITTEN, *([subfolder] if subfolder else []))):
        _check_link(key, folder, path)
        for inside in path.iterdir() if path.is_dir() else ():
            _check_link(key, folder, inside)


def _check_link(key: str, folder: Path, path: Path) -> None:
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        where = os.readlink(path)
        refuse(f"{path} is a link that leads out of {folder}, to {where}; remove it, or choose another {key}")


def _lock(folder: Path, key: str) -> None:
    problem = _why_not_writable(folder)
    try:
        if problem is None:
            hold(folder, EARLIER_ATTEMPT_S if started_again() else 0.0)
    except OSError as error:
        problem = explain(error, folder)
    if problem is not None:
        kind = "run" if key == "hydra.run.dir" else "sweep"
        refuse(f"the {kind} directory {folder} cannot be written: {problem}; choose another {key}")


def _why_not_writable(folder: Path) -> str | None:
    """Tries to write a small file to ``folder``, or to the nearest folder above it that exists."""
    existing = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".writable-") as file:
            file.write(b"\n" * 4096)
            file.flush()
    except OSError as error:
        return explain(error, existing)
    return None
