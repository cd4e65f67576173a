"""Folders of cached data, built once and whole, however many processes ask for them; mapped files; downloads."""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import queue
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from common.errors import DataError
from common.files import atomic_folder, expand_home, explain

logger = logging.getLogger(__name__)

_PROJECT = "one-word-parallel"
_SIZES = "sizes.json"
_WARN_AFTER_S = 5.0
_DOWNLOAD_S = 840.0  # less than other processes wait for the folder that is downloaded
_WAY_OUT = "Free some space, or choose another folder with data.cache_dir=FOLDER"
# Errors that another disk may not have. Any other, such as a path that cannot be a folder, the user has to correct.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def cached_folder(
    cache_dir: str | os.PathLike | None,
    name: str,
    build: Callable[[Path], None],
    timeout_s: float = 900.0,
) -> Path:
    """Return the folder ``cache_dir/name``, built first where it does not exist or files of it are lost or cut short.

    One process builds under a file lock and the others wait. The folder appears by one rename after its files are on
    the disk. If the disk is full or not writable, the folder is built in the system's temporary folder instead, after a
    warning, and removed when this process ends; the next run tries ``cache_dir`` again.

    Args:
        cache_dir: The folder that holds all cached data; None for the user's cache folder.
        name: Names the content: it carries a hash of everything that the content depends on.
        build: Fills the empty folder that it is given. An OSError is taken for an error of the disk; whatever else it
            raises passes through.
        timeout_s: Seconds to wait for another process that builds the same folder. Waiting is reported after 5.

    Raises:
        DataError: The lock is held for too long, ``cache_dir`` cannot be a folder, or the temporary folder cannot hold
            the data either. Nothing is left behind.
    """
    root = expand_home(cache_dir) if cache_dir is not None else default_cache_dir()
    # The name does not change from process to process, so that the other ranks of a run find what one has built.
    spare = Path(tempfile.gettempdir()) / f"{_PROJECT}-{os.getuid()}"
    for place in (root, spare):
        if (place == root or _is_private(place)) and _is_whole(place / name):
            return place / name
    try:
        return _build_under_lock(root / name, build, timeout_s)
    except OSError as error:
        problem = f"cannot write the data cache {root / name}: {explain(error, root)}"
        if cache_dir is not None and error.errno not in _DISK_ERRORS:
            raise DataError(f"{problem}. {_WAY_OUT}") from error
    try:
        spare.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(spare):
            raise PermissionError(errno.EACCES, "other users can write there")
        folder = _build_under_lock(spare / name, build, timeout_s)
    except OSError as error:
        raise DataError(f"{problem}. Nor {spare / name}: {explain(error, spare)}. {_WAY_OUT}") from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning("%s. For this run the data lie in %s", problem, folder)
    return folder


def default_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/one-word-parallel``, by default ``~/.cache/one-word-parallel``."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / _PROJECT
    except RuntimeError:
        raise DataError(
            f"there is no place for cached data: HOME is not set, and user {os.getuid()} has no home folder. Give one: "
            "data.cache_dir=FOLDER"
        ) from None


@contextmanager
def file_lock(path: Path, waiting_for: str, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock on a file, which the system releases when its holder ends, however that is.

    Raise DataError where another process, doing ``waiting_for``, holds it for longer than ``timeout_s`` seconds.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=min(_WARN_AFTER_S, timeout_s))
    except Timeout:
        logger.warning("waiting for %s (lock %s, at most %.0f s)", waiting_for, path, timeout_s)
        try:
            lock.acquire(timeout=max(0.0, timeout_s - _WARN_AFTER_S))
        except Timeout:
            raise DataError(
                f"waited {timeout_s:.0f} s for {waiting_for}, which holds the lock {path}. "
                "End that process if it hangs, or choose another folder with data.cache_dir=FOLDER"
            ) from None
    try:
        yield
    finally:
        lock.release()


def _is_whole(folder: Path) -> bool:
    """Whether a folder is there, and its files have the sizes that they were written with."""
    try:
        sizes = json.loads((folder / _SIZES).read_text()) if (folder / _SIZES).exists() else {}
        return folder.is_dir() and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _build_under_lock(folder: Path, build: Callable[[Path], None], timeout_s: float) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.with_name(f".{folder.name}.lock"), f"another process to build {folder}", timeout_s):
        if not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
            with atomic_folder(folder) as draft:
                build(draft)
                files = [path for path in draft.rglob("*") if path.is_file()]
                sizes = {str(path.relative_to(draft)): path.stat().st_size for path in files}
                (draft / _SIZES).write_text(json.dumps(sizes))
    return folder


def _is_private(folder: Path) -> bool:
    """Whether a folder is this user's own and nobody else can write to it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


class MappedFile:
    """Numbers in a file, or in a part of it, that are read from the disk when they are used.

    A started process is sent the path, and maps the file again.

    Attributes:
        path: The file.
        dtype: Of the numbers, as numpy names it.
        offset: The first one's place, in bytes.
        count: How many there are; by default, all from there on.
        array: The numbers, [count].
    """

    def __init__(self, path: Path, dtype: str, offset: int = 0, count: int | None = None):
        """Map the file now: it can be read from then on, also when it is removed."""
        self.path, self.dtype, self.offset = path, dtype, offset
        self.count = (path.stat().st_size - offset) // np.dtype(dtype).itemsize if count is None else count
        # A view as a plain array: indexing np.memmap itself costs microseconds more. None of no bytes can be made.
        mapped = np.memmap(path, dtype, "r", offset, (self.count,)) if self.count else np.empty(0, dtype)
        self.array = mapped.view(np.ndarray)

    def __reduce__(self) -> tuple:
        return MappedFile, (self.path, self.dtype, self.offset, self.count)

    def check_length(self) -> None:
        """Raise DataError if the file was cut short: reading the lost part of a map would end this process."""
        try:
            size = os.stat(self.path).st_size
        except FileNotFoundError:
            return  # its bytes stay readable as long as they are mapped
        needed = self.offset + self.array.nbytes
        if size < needed:
            raise DataError(
                f"{self.path} was cut short while it was read: it has {size:,} bytes, and had {needed:,} or more. "
                "Write it again, and go on with the run by train.resume=auto"
            )


def fetch(what: str, work: Callable[[], Any], way_out: str, timeout_s: float | None = None) -> Any:
    """Return what ``work`` downloads; a full disk's OSError passes through.

    It runs in a daemon thread, because one that hangs in a name look-up or a socket cannot be ended, only left behind.

    Raises:
        DataError: It fails or takes longer than ``timeout_s`` (None: 14 minutes). The message ends with ``way_out``.
    """
    timeout_s = timeout_s or _DOWNLOAD_S
    outcome: queue.Queue = queue.Queue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="download", daemon=True).start()
    try:
        result, error = outcome.get(timeout=timeout_s)
    except queue.Empty:
        result, error = None, TimeoutError(f"took more than {timeout_s:.0f} s")
    if error is None:
        return result
    if isinstance(error, DataError) or getattr(error, "errno", None) == errno.ENOSPC:
        raise error
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    raise DataError(f"downloading {what} failed ({reason}). {way_out}") from error
