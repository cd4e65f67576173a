"""Writes files completely or not at all; finds folders and weights; errors with the free space of a disk."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import UserError

TYPED_IN = "TRAIN_PATHS_TYPED_IN"  # the variable with the folder of relative paths, if it is not the current folder
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # ORGANISATION/NAME, or NAME
_PLAIN = (type(None), bool, int, str)  # types that JSON has as well


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file under a temporary name, flush it to the disk and rename it into place.

    A reader, or a run after a crash, sees the old file or the new file, never a part of it. The folder is made if it is
    missing. Text is written as UTF-8.

    Raises:
        OSError: If the disk is full or not writable. The old file is unchanged and the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())  # before the rename, which may otherwise reach the disk before the data
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty, hidden folder. When the block ends, it is flushed to the disk and renamed to ``folder``.

    At that moment ``folder`` must not exist, or must be empty. Files of a killed process in the hidden folder are
    removed first. Only one process at a time may do this for the same name.

    Raises:
        OSError: If the disk is full or not writable. The hidden folder is removed, as after an error in the block.
    """
    draft = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        for path in [*draft.rglob("*"), draft]:
            flush_path(path)
        os.replace(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    flush_path(folder.parent)


def check_regular(path: Path) -> None:
    """Raise OSError if a path is not a regular file: reading a device, a pipe or a socket might never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def expand_home(path: str | os.PathLike, base: Path | None = None) -> Path:
    """Return a path with ``~`` or ``~user`` replaced by the home folder; raise UserError if there is none.

    A relative path is resolved in ``base``, otherwise in the folder in the variable ``TYPED_IN``, if it is set.
    """
    try:
        return Path(base or os.environ.get(TYPED_IN, ""), Path(path).expanduser())
    except RuntimeError:
        raise UserError(f"{path}: no such home folder, or HOME is not set; give a whole path") from None


def find_weights(weights: str | os.PathLike) -> Path:
    """Return the path of weights. For a name of the Hugging Face hub, it is the folder that ``hf download`` fills."""
    path = expand_home(weights)
    if path.exists() or not _HUB_NAME.fullmatch(str(weights)):
        return path
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = expand_home(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    repository = cache / f"models--{str(weights).replace('/', '--')}"
    try:
        return repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except OSError:
        return path


def download_hint(weights: str | os.PathLike) -> str:
    """Return how to download missing weights, if their path can be a name of the Hugging Face hub; otherwise ""."""
    if not _HUB_NAME.fullmatch(str(weights)):
        return ""
    return f". If it is a model of the Hugging Face hub, type hf download {weights}, then the same command again"


def folder_of(weights: str | os.PathLike) -> Path:
    """Return the folder of weights: the path itself, or the folder of a .safetensors file."""
    path = find_weights(weights)
    return path.parent if path.suffix == ".safetensors" and not path.is_dir() else path


def jsonable(value: Any) -> Any:
    """Return a copy of a value in JSON's types. NaN and infinity become None."""
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): item if type(item) in _PLAIN else jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [item if type(item) in _PLAIN else jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # tensors, numpy arrays and numpy numbers
        return jsonable(value.tolist())
    return str(value)


@cache
def template(path: Path, html: bool = False, **filters: Callable) -> Any:
    """Return a file's jinja template. It may use ``filters``. If ``html`` is true, values are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(path.parent),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= filters
    return templates.get_template(path.name)


def flush_path(path: Path) -> None:
    """Force a file's content, or a folder's entries (names, renames), to the disk; raise OSError if that fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain(error: BaseException, path: Path) -> str:
    """Return an error's message and the free space on the disk of ``path``."""
    return f"{getattr(error, 'strerror', None) or error}; {free_space(path)}"


def free_space(path: Path) -> str:
    """Return the free space at ``path``, or at the nearest folder above it: ``12.3 MiB are free at FOLDER``."""
    try:
        folder = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir())
        return f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB are free at {folder}"
    except OSError:
        return f"the free space at {path} is unknown"
