"""Folders that are built once, whole or not at all, however many processes ask for them."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import DataError
from common.files import explain, flush_path
from data import spare

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_SAY_AFTER_S = 5.0


def cached_folder(
    cache_dir: str | os.PathLike | None,
    name: str,
    build: Callable[[Path], None],
    intact: Callable[[Path], bool] = Path.is_dir,
    timeout_s: float = 900.0,
) -> Path:
    """The folder `cache_dir`/`name`, filled by `build(temporary folder)` if it is not there yet.

    `name` must name the content (carry a hash of all that it depends on): a folder that exists is never
    rebuilt, unless `intact(folder)` is false. One process builds, under a file lock; the others wait for it,
    say so after 5 seconds, and give up after `timeout_s`. The folder appears by one rename after its files
    are on the disk.

    Where the disk is full or not writable, the folder is built in a temporary place instead (see
    data.spare), after a warning with the path and the free space; the next run tries `cache_dir` again.

    cache_dir: None for the user's cache folder (see default_cache_dir).
    Raises DataError if the lock is held too long, if `cache_dir` cannot be a folder, or if no temporary
    place can hold the data either; nothing is left behind then. Whatever `build` raises passes through,
    except OSError, which is taken for trouble with the disk.
    """
    root = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    folder = root / name
    if folder.is_dir() and intact(folder):
        return folder
    for place in spare.places(make=False):  # what another rank of this run has had to build there
        if (place / name).is_dir() and intact(place / name):
            return place / name
    problems: list[str] = []
    for place in _one_after_the_other(root):
        try:
            found = _locked(place, name, build, intact, timeout_s)
        except OSError as error:
            problems.append(f"{place / name}: {explain(error, place)}")
            if error.errno not in spare.DISK_TROUBLE:
                break
            continue
        if problems:
            spare.remove_at_exit(found)
            logger.warning("cannot write the data cache %s. For this run the data lie in %s", problems[0], found)
        return found
    raise DataError(
        f"cannot write the data cache {'. Nor '.join(problems)}. "
        "Free some space, or choose another place with data.cache_dir=FOLDER"
    )


def _one_after_the_other(root: Path) -> Iterator[Path]:
    yield root
    yield from spare.places(make=True)


def _locked(
    root: Path, name: str, build: Callable[[Path], None], intact: Callable[[Path], bool], timeout_s: float
) -> Path:
    folder = root / name
    root.mkdir(parents=True, exist_ok=True)
    with file_lock(root / f".{name}.lock", f"another process to build {folder}", timeout_s):
        if not (folder.is_dir() and intact(folder)):
            _build(folder, build)
    return folder


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME (or ~/.cache)/one-word-parallel; a temporary folder where that cannot be written.

    The fall-back is announced by a warning, because a temporary folder is emptied sooner or later.
    """
    preferred = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / spare.PROJECT
    try:
        preferred.mkdir(parents=True, exist_ok=True)
        if os.access(preferred, os.W_OK | os.X_OK):
            return preferred
        reason = "it is not writable"
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return preferred
        reason = error.strerror
    fallback = spare.own_folder(Path(tempfile.gettempdir()))
    if fallback is None:
        return preferred  # whose own error then says what is wrong
    logger.warning(
        "cannot cache data in %s (%s); using %s. Choose with data.cache_dir=FOLDER",
        preferred,
        reason,
        fallback,
    )
    return fallback


@contextmanager
def file_lock(path: Path, waiting_for: str, timeout_s: float) -> Iterator[None]:
    """Holds an exclusive lock on the file `path`; the system frees it when its holder dies, however that is.

    Raises DataError, which says what it was `waiting_for`, after `timeout_s` seconds.
    """
    start, said = time.monotonic(), False
    with open(path, "ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - start
            if waited > timeout_s:
                raise DataError(
                    f"waited {waited:.0f} s for {waiting_for}, which holds the lock {path}. "
                    "End that process if it is stuck, or choose another place with data.cache_dir=FOLDER"
                )
            if waited > _SAY_AFTER_S and not said:
                logger.warning("waiting for %s (lock %s, at most %.0f s)", waiting_for, path, timeout_s)
                said = True
            time.sleep(_POLL_S)
        # The file stays: removing it would let a third process lock a new file of the same name.
        yield


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    """Builds in a folder beside `folder`, flushes it to the disk, renames it. To be called under the lock."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    # Under the lock these can only be what a killed process left, or a folder that is no longer intact.
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        temporary.mkdir()
        build(temporary)
        for path in [*(p for p in temporary.rglob("*") if p.is_file()), temporary]:
            flush_path(path)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush_path(folder.parent)
