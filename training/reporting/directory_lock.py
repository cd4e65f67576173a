"""One run at a time in a directory: a lock that the system frees when its holder ends, however that is.

It is a POSIX record lock on the file ``.lock``, which names its holder. Unlike ``flock``, which filelock takes, it is
not inherited by the processes that read data: these outlive a killed run by seconds, in which it is to be resumed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import TrainingError, printable

LOCK = ".lock"
EARLIER_ATTEMPT_S = 120.0  # how long a network file system may keep the lock of a machine that has died

_POLL_S = 1.0
# The locks of this process by directory: the descriptor, and the directories that were made for it.
_held: dict[Path, tuple[int, list[Path]]] = {}


def hold(folder: Path, patience_s: float = 0.0) -> None:
    """Lock a directory, which is made if need be, until ``release`` or this process's end.

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
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = printable(os.pread(descriptor, 200, 0).decode(errors="replace"))
                os.close(descriptor)
                if time.monotonic() > deadline:
                    raise TrainingError(
                        f"{folder} is in use by another run: {holder}. Two runs would write over each other: wait for "
                        "that one, end it, or choose another directory (hydra.run.dir, of a sweep hydra.sweep.dir)"
                    ) from None
                time.sleep(_POLL_S)
                continue
            said = f"{folder} cannot be locked ({error.strerror}): nothing keeps a second run out of it"
            print(f"warning: {said}", file=sys.stderr)
        if os.fstat(descriptor).st_nlink == 0:  # its holder has removed the file since it was opened
            os.close(descriptor)
            continue
        with suppress(OSError):  # on a full disk the lock is held, but not signed
            os.ftruncate(descriptor, 0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode(), 0)
        _held[folder] = descriptor, made


def release(folder: Path) -> None:
    """Remove the lock of a directory, if this process holds it, and the directory if it was made for the lock only."""
    descriptor, made = _held.pop(folder.resolve(), (None, []))
    if descriptor is None:
        return
    with suppress(OSError):
        # The directory may have been deleted, and another run may have made it again.
        if os.path.samestat(os.fstat(descriptor), os.lstat(folder / LOCK)):
            (folder / LOCK).unlink()
        for path in made:
            path.rmdir()  # until one is not empty
    os.close(descriptor)


@contextmanager
def locked_directories() -> Iterator[None]:
    """At the end of the block, remove the locks that were made in it."""
    try:
        yield
    finally:
        for folder in list(_held):
            release(folder)
