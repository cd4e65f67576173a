"""Folders of cached data, which are built once and completely for any number of processes; mapped files; downloads."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from common.errors import DataError, UserError
from common.files import atomic_folder, expand_home, explain

logger = logging.getLogger(__name__)

_WARN_AFTER_S = 5.0
_ANSWER_S = 20.0  # the longest time for a server to answer, or to send the next byte


def cached_folder(cache_dir: str | os.PathLike | None, name: str, build: Callable[[Path], None]) -> Path:
    """Return the folder ``cache_dir/name``, and build it first if it does not exist.

    One process builds it under a file lock, which the system releases when its holder ends, and the others wait. The
    folder appears by one rename after its files are on the disk.

    Args:
        cache_dir: The folder of all cached data; None for the user's cache folder.
        name: The name of the content, with a hash of everything on which the content depends.
        build: A function that fills an empty folder.

    Raises:
        DataError: If the disk is full, or ``cache_dir`` cannot be written to. Nothing is left behind.
    """
    folder = cache_root(cache_dir) / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{name}.lock"))
        try:
            held = lock.acquire(timeout=_WARN_AFTER_S)
        except Timeout:
            logger.warning("waiting for another process to build %s (lock %s)", folder, lock.lock_file)
            held = lock.acquire()
        with held:
            if not folder.is_dir():
                with atomic_folder(folder) as draft:
                    build(draft)
    except OSError as error:
        path, root = Path(os.fsdecode(error.filename or folder)), folder.parent
        if root not in (path, *path.parents) and path not in root.parents:
            raise  # it is about a file that is read to build the folder
        raise DataError(
            f"cannot write the data cache {folder}: {explain(error, root)}. Free space, or set data.cache_dir=FOLDER"
        ) from error
    return folder


def key_of(*content: Any) -> str:
    """Return a hash of JSON, for the name of something in the cache."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def cache_root(cache_dir: str | os.PathLike | None) -> Path:
    """Return the folder of all cached data; for None, the user's, in $XDG_CACHE_HOME or ~/.cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "one-word-parallel")
    try:
        return expand_home(default if cache_dir is None else cache_dir)
    except UserError as error:
        raise DataError(f"{error}: data.cache_dir=FOLDER") from None


class MappedFile:
    """Numbers in a file, or in a part of it, that are read from the disk when they are used.

    Another process gets the path, and maps the file again.

    Attributes:
        path: The file.
        dtype: numpy's name of the dtype of the numbers.
        offset: The position of the first number, in bytes.
        count: The number of numbers; by default, all from there on.
        array: The numbers, [count].
    """

    def __init__(self, path: Path, dtype: str, offset: int = 0, count: int | None = None):
        """Map the file now. It can be read from then on, even if it is removed."""
        self.path, self.dtype, self.offset = path, dtype, offset
        self.count = (path.stat().st_size - offset) // np.dtype(dtype).itemsize if count is None else count
        # A view as a plain array, because indexing np.memmap itself takes microseconds more. An empty one is not
        # allowed.
        mapped = np.memmap(path, dtype, "r", offset, (self.count,)) if self.count else np.empty(0, dtype)
        self.array = mapped.view(np.ndarray)

    def __reduce__(self) -> tuple:
        return MappedFile, (self.path, self.dtype, self.offset, self.count)


def first_file(root: Path, names: Sequence[str], way_out: str) -> Path:
    """Return the first of these files that ``data.root`` has. Raises DataError, with a ``way_out``, without any."""
    if not root.is_dir():
        raise DataError(f"data.root={root} is not a folder that exists. {way_out}")
    if (path := next(filter(Path.is_file, map(root.joinpath, names)), None)) is None:
        raise DataError(f"data.root={root} holds none of {', '.join(names)}. {way_out}")
    return path


@contextmanager
def downloading(what: str, way_out: str) -> Iterator[None]:
    """Limit the time that a server has to answer inside the block, and add a fix to the error of a failed download.

    Raises:
        DataError: If the download fails or hangs. The message ends with ``way_out``. The OSError of a full disk is not
            changed.
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
