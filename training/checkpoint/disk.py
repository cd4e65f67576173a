"""Files of a checkpoint: whole under their names, hashed, removed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path


def write_json(path: Path, content: dict) -> None:
    """Whole under its name, or not there. Raises OSError."""
    partial = path.with_name(f".{path.name}.tmp")
    with open(partial, "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()  # Python 3.10 has no hashlib.file_digest
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def remove(folder: Path) -> None:
    """Delete a checkpoint. It loses its name first, so that half of it is never taken for one."""
    doomed = folder if folder.name.startswith(".") else folder.with_name(f".{folder.name}.removed.tmp")
    if doomed != folder:
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
