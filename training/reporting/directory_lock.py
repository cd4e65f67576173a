"""One run at a time in a directory: a lock that the system frees when its holder ends, however that is.

It is a POSIX record lock on the file ``.lock``, which names its holder. Child processes do not inherit it, and network
file systems have it too (NFS by its lock service), where the holder may be on another machine.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import TrainingError

LOCK = ".lock"
EARLIER_ATTEMPT_S = 120.0  # how long a network file system may keep the lock of a machine that has died

_POLL_S = 1.0
_LONGEST = 4096  # bytes of the file that are read
# The locks of this process by directory: the descriptor, and the directories that were made for it.
_held: dict[Path, tuple[int, list[Path]]] = {}


def hold(folder: Path, patience_s: float = 0.0) -> None:
    """Locks a directory, which is made if need be, until ``release`` or this process's end.

    Does nothing if this process holds the lock already. Where the file system has no locks, a warning says so.

    Args:
        folder: The directory of a run or of a sweep.
        patience_s: How long to wait, in seconds, for a holder that is about to end.

    Raises:
        TrainingError: Another process holds the lock. The message names it.
        OSError: The directory cannot be written.
    """
    folder = folder.resolve()
    deadline = time.monotonic() + patience_s
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    while folder not in _held:
        try:
            _held[folder] = _lock(folder), made
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"{folder} is in use by another run: {error}. Two runs would write over each other: wait for that "
                    "one, end it, or choose another directory (hydra.run.dir, of a sweep hydra.sweep.dir)"
                ) from None
            time.sleep(_POLL_S)


def release(folder: Path) -> None:
    """Removes the lock of a directory, if this process holds it, and the directory if it was made for the lock only."""
    folder = folder.resolve()
    if folder not in _held:
        return
    descriptor, made = _held.pop(folder)
    with suppress(OSError):
        if _is_file_of(descriptor, folder / LOCK):  # the directory may be gone, and another in its place
            (folder / LOCK).unlink()
        for path in made:
            path.rmdir()  # until one is not empty
    os.close(descriptor)


@contextmanager
def locked_directories() -> Iterator[None]:
    """At its end, removes the locks that were made in the block."""
    try:
        yield
    finally:
        for folder in list(_held):
            release(folder)


def _lock(folder: Path) -> int:
    """Returns the descriptor of the locked file. Raises BlockingIOError, which describes the holder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_file_of(descriptor, path):  # removed by its holder before this process had the lock
                os.close(descriptor)
                continue
            _sign(descriptor)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = _read(descriptor)
                os.close(descriptor)
                raise BlockingIOError(holder) from None
            print(
                f"warning: {folder} cannot be locked ({error.strerror}): nothing keeps a second run out of it",
                file=sys.stderr,
            )
        return descriptor


def _sign(descriptor: int) -> None:
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with suppress(OSError):  # on a full disk the lock is held, but not signed
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _read(descriptor: int) -> str:
    """Returns the holder in words."""
    try:
        holder = json.loads(os.pread(descriptor, _LONGEST, 0))
        return f"process {int(holder['pid'])} on {str(holder['host'])[:64]}, since {str(holder['since'])[:32]}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "a process that has not signed its lock"


def _is_file_of(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
