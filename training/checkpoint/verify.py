"""Whether a checkpoint is whole, bit for bit, and fit to be trained on."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import CheckpointError
from training.checkpoint.manifest import MANIFEST, checkpoint_folder, parse_manifest


def manifest_at(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint whose files all exist with the right sizes.

    Args:
        path: See ``checkpoint_folder``.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    folder = checkpoint_folder(Path(path))
    if not (folder / MANIFEST).exists():
        raise CheckpointError(
            f"no checkpoint at {path}: expected a folder with a {MANIFEST}, such as RUN_DIR/checkpoints/latest"
        )
    manifest = parse_manifest(folder / MANIFEST)
    for name, entry in manifest["files"].items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != entry["bytes"]:
            problem = "is missing or no regular file" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{folder / name} {problem}, the manifest says {entry['bytes']}: the checkpoint is damaged"
            )
    return manifest


def first_damaged(folder: Path, manifest: dict) -> str | None:
    """Compares the checksums of all files, and looks for tensors that are not finite.

    Returns:
        What is wrong with the first damaged file; None if all are as they were written and can be trained on.
    """
    for name, entry in manifest["files"].items():
        try:
            checksum = sha256(folder / name)
        except OSError as error:
            return f"{folder / name} cannot be read: {error}"
        if checksum != entry["sha256"]:
            expected = entry["sha256"][:12]
            return f"{folder / name} is damaged: its sha256 is {checksum[:12]}…, the manifest says {expected}…"
        if name.endswith(".safetensors") and (problem := _first_not_finite(folder / name)) is not None:
            return f"{folder / name} cannot be used: {problem}"
    return None


def why_not_finite(name: str, tensor: Tensor) -> str | None:
    """Returns what is wrong with a weight of a run that has diverged; None for a sound one.

    It is a NaN or an infinity. But -inf alone is an attention mask, and an optimizer may overflow and go on.

    Args:
        name: The tensor's name; one of the optimizer's has a slash.
        tensor: The tensor.
    """
    if "/" in name or not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    least, largest = tensor.aminmax()
    if least.isnan() or largest.isnan() or largest == math.inf:
        return f"{name} is not finite"
    return None


def _first_not_finite(path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            problems = (why_not_finite(name, file.get_tensor(name)) for name in file.keys())
            return next((problem for problem in problems if problem is not None), None)
    except (OSError, SafetensorError) as error:
        return str(error)


def sha256(path: Path) -> str:
    """Returns the checksum of a file's content, in hexadecimal.

    Raises:
        OSError: The file cannot be read.
    """
    digest = hashlib.sha256()  # Python 3.10 has no hashlib.file_digest
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
