"""Compressed files. They are unpacked into the cache, once, because rows are read in any order."""

from __future__ import annotations

import gzip
import os
import shutil
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from common.errors import DataError
from data.cache import cached_folder, key_of

SUFFIXES = (".gz", ".zst")


def unpacked(path: Path, cache_dir: str | os.PathLike | None) -> Path:
    """Return the path of a file's content: the file itself, or what the cache has of a compressed one.

    Raises:
        DataError: If the file is damaged, or nothing here unpacks it.
    """
    if path.suffix not in SUFFIXES:
        return path
    status = path.stat()

    def build(folder: Path) -> None:
        try:
            with gzip.open(path) if path.suffix == ".gz" else _open_zstd(path) as packed:
                with open(folder / path.stem, "wb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)
        except Exception as error:
            if isinstance(error, DataError) or getattr(error, "errno", None) is not None:  # such as a full disk
                raise
            long = f", or unpack what zstd --long has written: zstd -d --long=31 {path}" * (path.suffix == ".zst")
            raise DataError(f"{path} cannot be unpacked ({error}); copy it again{long}") from None

    # Hidden: the cache may be in the folder of the data.
    name = f".unpacked-{key_of(str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns)}"
    return cached_folder(cache_dir, name, build) / path.stem


def _open_zstd(path: Path) -> Any:
    with suppress(ImportError):
        return import_module("pyarrow").input_stream(str(path), compression="zstd")
    raise DataError(f"{path} needs the package pyarrow. Type pip install pyarrow, or unpack it: zstd -d {path}")
