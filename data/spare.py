"""Temporary places for cached data, for a run that finds the cache's own disk full or not writable."""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

PROJECT = "one-word-parallel"
# What another disk can help with; a path that cannot be a folder is the user's to correct.
DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_MEMORY = Path("/dev/shm")


def places(make: bool) -> list[Path]:
    """Folders of this user's own, in the order in which they are tried: the system's temporary one, then memory.

    make  whether to make those that are missing
    """
    found = (own_folder(parent, make) for parent in (Path(tempfile.gettempdir()), _MEMORY))
    return [folder for folder in dict.fromkeys(found) if folder is not None]


def own_folder(parent: Path, make: bool = True) -> Path | None:
    """This user's folder in ``parent``; None where there is none and none can be made, or others may write in it.

    Its name can be foreseen, so that all ranks of a run find it; what others could write is not to be trusted.
    """
    folder = parent / f"{PROJECT}-{os.getuid()}"
    try:
        if make:
            folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return folder if mine and not status.st_mode & 0o022 else None


def remove_at_exit(folder: Path) -> None:
    """Remove ``folder`` when this process ends: the memory or the disk it takes is not the cache's."""
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
