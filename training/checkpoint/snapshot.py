"""The first part of a save, on every writing rank: copying the tensors, and writing the copies into the draft."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import CheckpointError
from common.files import flush_path, free_space, write_atomically
from common.machine import available_memory
from parallel.host_group import BACKEND
from parallel.sharding import Rows, local, rows_of
from parallel.strategy import Strategy
from training.checkpoint.commit import await_sidecars
from training.checkpoint.manifest import Optimizer, sidecar_name
from training.checkpoint.tensor_file import write_rows
from training.checkpoint.verify import sha256, why_not_finite

log = logging.getLogger("training")

RESERVE = 512 * 2**20  # bytes that a copy leaves free


@dataclass(frozen=True)
class Share:
    """One of the ranks that write the files of a stage together.

    Attributes:
        number: Its place among them. The first one waits for the others and completes the files.
        of: How many they are.
        rows: Which rows it has of each tensor.
    """

    number: int
    of: int
    rows: dict[str, Rows]


@dataclass
class StageFiles:
    """What a checkpoint holds of one stage.

    Attributes:
        stage: The stage's index.
        files: Tensors by name, by the name of their file.
        share: Which rows of the tensors these are, where several ranks write a file together; None for whole ones.
    """

    stage: int
    files: dict[str, dict[str, Tensor]]
    share: Share | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of all files by name."""
        return {name: tensor for file in self.files.values() for name, tensor in file.items()}


class StagingBuffers:
    """Main memory for the copies of a save, reused by every save, by one thread at a time.

    Memory that is new to a process costs far more time than the copy itself.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor, which replaces the copy of the same name before."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return buffer.copy_(tensor)

    def missing_bytes(self, tensors: dict[str, Tensor]) -> int:
        """Returns the bytes of those tensors that have no buffer yet."""
        return sum(tensor.nbytes for name, tensor in tensors.items() if name not in self._buffers)


def stage_files(strategy: Strategy, optimizer: Optimizer) -> list[StageFiles]:
    """Returns what this rank saves: its stages or its share of them, if it has part in the first copy of the model.

    A tied parameter is saved only by the stage that owns its canonical name.
    """
    mesh = strategy.mesh
    if mesh.copy != 0:
        return []
    tied = strategy.chain.tied
    stages = []
    for plan, stage in zip(strategy.plan.stages_of(mesh.position), strategy.stages, strict=True):
        weights = {name: tensor for name, tensor in stage.layers.state_dict().items() if name not in tied}
        states = {
            f"{name}/{key}": value
            for name, parameter in stage.layers.named_parameters()
            if name not in tied
            for key, value in optimizer.state_of(parameter).items()
            if torch.is_tensor(value)
        }
        files = {"model": weights, "optimizer": states}
        named = {f"{kind}-{plan.index:02d}.safetensors": tensors for kind, tensors in files.items() if tensors}
        share = None
        if mesh.shards > 1:
            share = Share(mesh.shard, mesh.shards, {n: rows_of(t) for part in named.values() for n, t in part.items()})
        own = {file: {n: local(t) for n, t in tensors.items()} for file, tensors in named.items()}
        stages.append(StageFiles(plan.index, own, share))
    return stages


@torch.no_grad()
def copy_files(stages: list[StageFiles], writers: int, buffers: StagingBuffers) -> list[StageFiles] | None:
    """Copies the tensors, so that training may change the originals.

    On a GPU the copy stays on the device where it fits, which takes milliseconds; elsewhere it goes to main memory.

    Args:
        stages: What is to be saved.
        writers: How many processes of this machine may be copying as much at the same time.
        buffers: Main memory for the copies; those of the save before are overwritten.

    Returns:
        The copies, or None where memory does not suffice for them.
    """
    tensors = {name: tensor for stage in stages for name, tensor in stage.tensors().items()}
    on_device = _devices_with_space(tensors.values(), writers)
    missing = buffers.missing_bytes({n: t for n, t in tensors.items() if t.device not in on_device})
    if missing and missing * writers + RESERVE > available_memory():
        log.debug("too little memory to copy the tensors: the checkpoint is written before training continues")
        return None

    def copy(name: str, tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.device in on_device else buffers.copy(name, tensor)

    copies = [
        replace(s, files={file: {n: copy(n, t) for n, t in part.items()} for file, part in s.files.items()})
        for s in stages
    ]
    for device in on_device:
        torch.cuda.synchronize(device)
    return copies


def _devices_with_space(tensors: Iterable[Tensor], writers: int) -> set[torch.device]:
    """Returns the GPUs that have space for another copy of the tensors on them while training continues."""
    needed: dict[torch.device, int] = {}
    for tensor in tensors:
        if tensor.device.type == "cuda":
            needed[tensor.device] = needed.get(tensor.device, 0) + tensor.nbytes
    sharing = writers if dist.is_initialized() and dist.get_backend() == BACKEND else 1
    return {device for device, size in needed.items() if _spare_memory(device, sharing) > size + RESERVE}


def _spare_memory(device: torch.device, sharing: int) -> int:
    """Returns the bytes of a GPU that no step of this process has needed so far.

    What torch's allocator keeps beyond what is allocated now is no spare memory: the next step needs it.

    Args:
        device: The GPU.
        sharing: How many processes may take memory that is still free.
    """
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] // sharing + unused


def write_stage(draft: Path, stage: StageFiles, timeout_s: float = 300.0) -> str | None:
    """Writes the files of a stage, or this rank's rows of them, into the draft, and then the sidecar.

    Args:
        draft: The folder.
        stage: What to write.
        timeout_s: The longest wait, in seconds, for other writers of these files while nothing is written.

    Returns:
        What went wrong; None if the files are on the disk.
    """
    sidecar = sidecar_name(stage.stage, stage.share.number if stage.share else 0)
    try:
        draft.mkdir(parents=True, exist_ok=True)
        check_finite(stage)
        content = {"files": write_files(draft, stage)} if stage.share is None else _write_share(draft, stage, timeout_s)
        write_sidecar(draft, sidecar, content)
        return None
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{error}; {free_space(draft.parent)}"
    for name in stage.files:  # makes space for the sidecar, and for others
        with suppress(OSError):
            (draft / name).unlink()
    try:
        write_sidecar(draft, sidecar, {"error": problem})
    except OSError:
        _mark_failed(draft, sidecar)
    return problem


def _write_share(draft: Path, stage: StageFiles, timeout_s: float) -> dict:
    """Writes this rank's rows of a stage's files. The first writer then waits for the others, and hashes the files.

    Returns:
        The content of the sidecar.

    Raises:
        CheckpointError: Another writer has failed, has written nothing for too long, or has other tensors.
        OSError: The disk is full or not writable.
    """
    share = stage.share
    layouts = {
        name: write_file(draft / name, {n: share.rows[n]._replace(tensor=t) for n, t in tensors.items()}, share)
        for name, tensors in stage.files.items()
    }
    if share.number > 0:
        return {"layouts": layouts}
    others = {sidecar_name(stage.stage, n): f"stage {stage.stage}, share {n}" for n in range(1, share.of)}
    for name, content in await_sidecars(draft, others, timeout_s).items():
        if content["layouts"] != layouts:
            raise CheckpointError(f"{others[name]} has other tensors than the first: they cannot share a file")
    for name in others:
        (draft / name).unlink()
    return {"files": {name: _described(draft / name) for name in stage.files}}


def check_finite(stage: StageFiles) -> None:
    """Raises CheckpointError for tensors that are not finite: nothing could go on from them."""
    for name, tensor in stage.tensors().items():
        if (problem := why_not_finite(name, tensor)) is not None:
            raise CheckpointError(f"{problem}: the run has diverged; try a lower optim.lr, or train.grad_clip=1.0")


def write_files(draft: Path, stage: StageFiles) -> dict[str, dict]:
    """Writes and flushes the files of a stage.

    Returns:
        The size and the sha256 of each file, by its name.

    Raises:
        OSError: The disk is full or not writable.
        SafetensorError: Likewise, as safetensors reports it.
    """
    return {name: write_file(draft / name, tensors) for name, tensors in stage.files.items()}


def write_file(path: Path, tensors: dict[str, Tensor] | dict[str, Rows], share: Share | None = None) -> dict | str:
    """Writes and flushes one safetensors file, or this rank's rows of it.

    Returns:
        The size and the sha256 of a whole file; of rows, what is equal on all ranks that write the same tensors.

    Raises:
        OSError: The disk is full or not writable.
        SafetensorError: Likewise, as safetensors reports it.
    """
    if share is not None:
        rows = {name: part._replace(tensor=_in_main_memory(part.tensor)) for name, part in tensors.items()}
        return write_rows(path, rows, first=share.number == 0)
    import safetensors.torch

    safetensors.torch.save_file({name: _in_main_memory(tensor) for name, tensor in tensors.items()}, path)
    flush_path(path)
    return _described(path)


def _described(path: Path) -> dict:
    """The size and the sha256 of a file, read again: it comes from the page cache, and was written without a copy."""
    return {"sha256": sha256(path), "bytes": path.stat().st_size}


def write_sidecar(draft: Path, name: str, content: dict) -> None:
    """Tells rank 0 that the files of a stage are written (``files``), or why they are not (``error``).

    Of a share, it tells the first writer of the stage.

    Raises:
        OSError: The disk is full or not writable.
    """
    write_atomically(draft / name, json.dumps(content, indent=1))


def _mark_failed(draft: Path, name: str) -> None:
    """Creates an empty file, which needs no space, and whose name says that this sidecar's writer has failed."""
    with suppress(OSError):  # then rank 0's wait ends by its time limit
        os.close(os.open(draft / f"{name}.failed", os.O_CREAT))


def _in_main_memory(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu().contiguous()
    # A stream's block makes the device current again that was current before, which in a new thread is device 0, and
    # that creates a context there: 500 MB for each rank.
    with torch.cuda.device(tensor.device):
        # On a stream of its own, so that training's kernels do not wait for the transfer; it waits for those that
        # still write the tensor.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            return tensor.cpu().contiguous()
