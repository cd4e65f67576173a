"""Folders of cached data, built once and whole, however many processes ask for them; mapped files; downloads."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from common.errors import DataError, UserError
from common.files import atomic_folder, expand_home, explain

logger = logging.getLogger(__name__)

_WARN_AFTER_S = 5.0
_ANSWER_S = 20.0  # a server may take to answer, or to send the next byte


def cached_folder(cache_dir: str | os.PathLike | None, name: str, build: Callable[[Path], None]) -> Path:
    """Return the folder ``cache_dir/name``, built first where it does not exist.

    One process builds under a file lock, which the system releases when its holder ends, and the others wait. The
    folder appears by one rename after its files are on the disk.

    Args:
        cache_dir: The folder that holds all cached data; None for the user's cache folder.
        name: Names the content: it carries a hash of everything that the content depends on.
        build: Fills the empty folder that it is given.

    Raises:
        DataError: The disk is full, or ``cache_dir`` cannot be written to. Nothing is left behind.
    """
    folder = cache_root(cache_dir) / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _waiting(FileLock(folder.with_name(f".{name}.lock")), folder):
            if not folder.is_dir():
                with atomic_folder(folder) as draft:
                    build(draft)
    except OSError as error:
        path, root = Path(os.fsdecode(error.filename or folder)), folder.parent
        if root not in (path, *path.parents) and path not in root.parents:
            raise  # of a file that is read for it
        raise DataError(
            f"cannot write the data cache {folder}: {explain(error, root)}. Free some space, or choose another "
            "folder with data.cache_dir=FOLDER"
        ) from error
    return folder


def cache_root(cache_dir: str | os.PathLike | None) -> Path:
    """Return the folder that holds all cached data; for None, the user's: $XDG_CACHE_HOME or ~/.cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "one-word-parallel")
    try:
        return expand_home(default if cache_dir is None else cache_dir)
    except UserError as error:
        raise DataError(f"{error}: data.cache_dir=FOLDER") from None


@contextmanager
def _waiting(lock: FileLock, folder: Path) -> Iterator[None]:
    """Hold a lock; say what for where that takes long."""
    try:
        lock.acquire(timeout=_WARN_AFTER_S)
    except Timeout:
        logger.warning("waiting for another process to build %s (lock %s)", folder, lock.lock_file)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


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


@contextmanager
def downloading(what: str, way_out: str) -> Iterator[None]:
    """Limit how long a server may be silent inside the block, and say what can be done where the download fails.

    Raises:
        DataError: It fails or hangs. The message ends with ``way_out``. A full disk's OSError passes through.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_ANSWER_S)
    try:
        yield
    except Exception as error:
        if isinstance(error, DataError) or getattr(error, "errno", None) == errno.ENOSPC:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(f"downloading {what} failed ({reason}). {way_out}") from error
    finally:
        socket.setdefaulttimeout(before)
