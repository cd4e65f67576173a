"""Locks run directories: a directory has one run at a time, and a new run never overwrites another run.

The lock is a POSIX record lock on the file ``.lock``, which names its holder. The system frees the lock when the holder
ends. The processes that read data outlive a killed run by seconds. They would inherit an ``flock``, which filelock
uses, but not this lock, so the run can be resumed at once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra.types import RunMode
from omegaconf import DictConfig

from common.errors import TrainingError, printable
from common.files import expand_home, explain
from conf import EVALUATES
from conf.schema import Root
from launchers import World
from launchers.world import restarts
from training.reporting.metrics import METRICS

LOCK = ".lock"

_EARLIER_ATTEMPT_S = 120.0  # seconds that a network file system may keep the lock of a machine that has died
_POLL_S = 1.0
# The locks of this process by directory: the file descriptor, and the directories that were made for the lock.
_held: dict[Path, tuple[int, list[Path]]] = {}


def hold(folder: Path) -> None:
    """Lock a directory, which is made if it does not exist, until ``release`` or this process's end.

    Does nothing if this process holds the lock already. After a restart, this waits until the earlier attempt
    has ended. On a file system without locks, a warning is printed.

    Raises:
        TrainingError: Another process holds the lock. The message names it.
        OSError: The directory cannot be written.
    """
    folder = folder.resolve()
    deadline = time.monotonic() + (_EARLIER_ATTEMPT_S if restarts() > 0 else 0.0)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    while folder not in _held:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # another process holds the lock: EAGAIN or EACCES
            holder = printable(os.pread(descriptor, 200, 0).decode(errors="replace"))
            os.close(descriptor)
            # A holder writes its name a moment after it has locked.
            if time.monotonic() > deadline + (0 if holder else _POLL_S):
                raise TrainingError(
                    f"{folder} is in use by another run: {holder}. Two runs would write over each other: wait for "
                    "that one, end it, or choose another directory (hydra.run.dir, of a sweep hydra.sweep.dir)"
                ) from None
            time.sleep(_POLL_S)
            continue
        except OSError as error:
            said = f"{folder} cannot be locked ({error.strerror}): a second run could write to it at the same time"
            print(f"warning: {said}", file=sys.stderr)
        if os.fstat(descriptor).st_nlink == 0:  # its holder has removed the file since it was opened
            os.close(descriptor)
            continue
        _held[folder] = descriptor, made
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode(), 0)


def release(folder: Path) -> None:
    """Remove the lock that this process holds, and the directory if it was made for the lock and is empty."""
    descriptor, made = _held.pop(folder.resolve(), (None, []))
    if descriptor is None:
        return
    with suppress(OSError):
        # The directory may have been deleted, and another run may have made it again.
        if os.path.samestat(os.fstat(descriptor), os.lstat(folder / LOCK)):
            (folder / LOCK).unlink()
        for path in made:
            path.rmdir()  # fails at the first one that is not empty
    os.close(descriptor)


@contextmanager
def locked_directories() -> Iterator[None]:
    """Remove the locks that were made in the block, at the end of the block."""
    try:
        yield
    finally:
        for folder in list(_held):
            release(folder)


@contextmanager
def removed_if_unused(run_dir: Path, files: Path | None) -> Iterator[None]:
    """If the block fails, remove the configuration's files from a run directory that contains nothing else.

    The directory itself is removed with its lock.
    """
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if files is not None and set(os.listdir(run_dir)) - {LOCK} == {files.name}:
                shutil.rmtree(files)
        raise


def take(config: DictConfig) -> None:
    """Lock the directory of a run or a sweep before anything is written there.

    The directories of a sweep's jobs are checked job by job elsewhere.

    Raises:
        TrainingError: The directory holds another run, cannot be written, or contains a link that leads out of it; or
            torchrun has started a sweep.
    """
    sweeps, world = config.hydra.mode is RunMode.MULTIRUN, World.detect()
    if sweeps and world is not None and world.size > 1:
        raise TrainingError("a sweep starts its processes itself: run python train.py -m … without torchrun or srun")
    kind = "sweep" if sweeps else "run"
    name, key = config.hydra[kind].dir, f"hydra.{kind}.dir"
    if not name:
        default = "multirun/" if sweeps else "outputs/"
        raise TrainingError(f"{key} is empty: name a directory, or leave it out for one below {default}")
    if name.startswith("~"):  # a folder named ~ would be made, and `rm -r ~` removes the home folder
        raise TrainingError(f"{key}={name}: ~ is not replaced here; write a whole path, such as $HOME/runs/a")
    folder = Path(name)
    try:
        for depth in ("*", "*/*", "*/*/*") if sweeps else ("*", "*/*"):
            for path in filter(Path.is_symlink, folder.glob(depth)):
                if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
                    raise TrainingError(
                        f"{path} is a link that leads out of {folder}, to {os.readlink(path)}; remove it, or choose "
                        f"another {key}"
                    )
        hold(folder)
    except OSError as error:
        raise TrainingError(
            f"the {kind} directory {folder} cannot be written: {explain(error, folder)}; choose another {key}"
        ) from error
    # Only after locking: otherwise a run that began at the same moment would be overlooked.
    if not sweeps and not started_again():
        check_free(folder, config)


def check_free(folder: Path, cfg: DictConfig | Root) -> None:
    """Check that a directory holds no run, except one that ``train.resume`` continues. Raises TrainingError.

    An evaluation must not use the directory of a run, because its numbers would replace those of the run.
    """
    resume, trains = cfg.train.resume, getattr(cfg.mode, "name", cfg.mode) not in EVALUATES
    if trains and resume is not None and (resume == "auto" or _is_of(folder.resolve(), expand_home(resume).resolve())):
        return
    saved = any((folder / "checkpoints").glob("step-*"))
    if saved or (folder / METRICS).exists():
        more = ""
        if trains and saved:
            more = ", or continue it with train.resume=auto"
        elif trains and resume is None:
            more = ", or, as it has no checkpoint, replace it by a run from step 1 with train.resume=auto"
        raise TrainingError(f"{folder} holds another run; choose another hydra.run.dir{more}")


def _is_of(run_dir: Path, resume: Path) -> bool:
    """Return whether a path to resume from is the run directory itself or one of its checkpoints."""
    return resume == run_dir or resume.is_relative_to(run_dir / "checkpoints")


def started_again() -> bool:
    """Return whether torchrun or a queue has restarted this rank, which then continues the run in the directory."""
    return World.detect() is not None and restarts() > 0
