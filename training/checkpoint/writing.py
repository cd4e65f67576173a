"""The first phase of a save: each stage's files into the draft, then its sidecar."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from common.files import flush_path, free_space
from training.checkpoint.disk import sha256, write_json
from training.checkpoint.paths import sidecar_name
from training.checkpoint.snapshot import Share


def write_share(draft: Path, share: Share) -> str | None:
    """Write one stage's files and say so by its sidecar; what went wrong, as text, else None."""
    try:
        draft.mkdir(parents=True, exist_ok=True)
        leave_sidecar(draft, share.stage, {"files": write_stage(draft, share)})
        return None
    except Exception as error:
        text = f"{error}; {free_space(draft.parent)}"
    for name in share.files:  # room for the sidecar, and for others
        with suppress(OSError):
            (draft / name).unlink()
    try:
        leave_sidecar(draft, share.stage, {"error": text})
    except OSError:
        _leave_mark(draft, share.stage)
    return text


def write_stage(draft: Path, share: Share) -> dict[str, dict]:
    """Write and flush the files of one stage; {name: {"sha256", "bytes"}}. Raises OSError, SafetensorError."""
    return {name: write_file(draft / name, tensors) for name, tensors in share.files.items()}


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> dict:
    """One safetensors file, on the disk. Returns its size and checksum."""
    import safetensors.torch

    safetensors.torch.save_file({name: _in_memory(tensor) for name, tensor in tensors.items()}, path)
    flush_path(path)
    # Read again and not hashed on the way: it comes out of the page cache, and save_file writes without a copy.
    return {"sha256": sha256(path), "bytes": path.stat().st_size}


def leave_sidecar(draft: Path, stage: int, content: dict) -> None:
    """Tell rank 0 that a stage is written (``files``), or why not (``error``). Raises OSError."""
    write_json(draft / sidecar_name(stage), content)


def _leave_mark(draft: Path, stage: int) -> None:
    """An empty file needs no room; its name says that this stage failed."""
    with suppress(OSError):  # then rank 0's wait ends by its time limit
        os.close(os.open(draft / f"{sidecar_name(stage)}.failed", os.O_CREAT))


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu().contiguous()
    # A stream of its own: training's kernels do not wait for the way to main memory.
    with torch.cuda.stream(torch.cuda.Stream(tensor.device)):
        return tensor.cpu().contiguous()
