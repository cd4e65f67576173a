"""What it takes for files to be on the disk, and for an error to say why they are not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def flush_path(path: Path) -> None:
    """Force a file's content, or a folder's entries (names, renames), to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain(error: BaseException, path: Path) -> str:
    """An error's own words, and the space that is left where ``path`` is or would be."""
    return f"{getattr(error, 'strerror', None) or error}; {free_space(path)}"


def free_space(path: Path) -> str:
    """As in "12.3 MiB are free at FOLDER": ``path``, or the nearest folder above it that exists."""
    try:
        there = next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir())
        return f"{shutil.disk_usage(there).free / 2**20:,.1f} MiB are free at {there}"
    except OSError:
        return f"the free space at {path} is unknown"
