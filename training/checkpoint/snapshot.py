"""What a rank writes into a checkpoint, copied first: training changes the originals while the copy is written."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.machine import available_memory
from training.checkpoint.room import Room

log = logging.getLogger("training")

RESERVE = 512 * 2**20  # bytes that a copy leaves free


@dataclass
class Share:
    """One stage's part of a checkpoint: tensors by name, by file."""

    stage: int
    files: dict[str, dict[str, Tensor]]


def shares_of(strategy: Any, optimizer: Any) -> list[Share]:
    """What this rank writes: its stages, where it is of the first replica. Tied copies stand only at home."""
    if strategy.mesh.replica != 0:
        return []
    tied = strategy.chain.tied
    shares = []
    for plan, stage in zip(strategy.plan.stages_of(strategy.mesh.position), strategy.stages, strict=True):
        weights = {k: v for k, v in stage.layers.state_dict().items() if k not in tied}
        states = {
            f"{name}/{key}": value
            for name, parameter in stage.layers.named_parameters()
            if name not in tied
            for key, value in optimizer.state_of(parameter).items()
            if torch.is_tensor(value)
        }
        files = {f"{kind}-{plan.index:02d}.safetensors": t for kind, t in (("model", weights), ("optimizer", states))}
        shares.append(Share(plan.index, {name: tensors for name, tensors in files.items() if tensors}))
    return shares


def make_room(shares: list[Share], writers: int, room: Room) -> None:
    """Have ``room`` ready for the copies of ``shares`` before they are wanted, where memory allows."""
    tensors, _ = _for_main_memory(shares)
    if _fits(tensors, writers, room):
        room.touch(tensors)


def copied(shares: list[Share], writers: int, room: Room) -> list[Share] | None:
    """``shares`` as they are now, or None where memory does not allow copies.

    writers  how many processes of this machine may be copying as much at the same time
    room     where copies go in main memory, over those of the save before
    On a GPU the copy stays there where it fits: that takes milliseconds, the way to main memory does not.
    """
    room.settle()
    tensors, roomy = _for_main_memory(shares)
    if not _fits(tensors, writers, room):
        log.debug("too little memory to copy the tensors: the checkpoint is written at once")
        return None

    @torch.no_grad()
    def copy(name: str, tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.device in roomy else room.place(name, tensor).copy_(tensor)

    copies = [
        Share(s.stage, {file: {k: copy(k, t) for k, t in part.items()} for file, part in s.files.items()})
        for s in shares
    ]
    for device in roomy:
        torch.cuda.synchronize(device)
    return copies


def _for_main_memory(shares: list[Share]) -> tuple[dict[str, Tensor], set[torch.device]]:
    """The tensors by name whose copies go to main memory, and the GPUs that have room for those of theirs."""
    tensors = {name: tensor for share in shares for part in share.files.values() for name, tensor in part.items()}
    roomy = _roomy_devices(tensors.values())
    return {name: tensor for name, tensor in tensors.items() if tensor.device not in roomy}, roomy


def _fits(tensors: dict[str, Tensor], writers: int, room: Room) -> bool:
    lacking = room.lacking(tensors)
    return lacking == 0 or lacking * writers + RESERVE <= available_memory()


def _roomy_devices(tensors: Iterable[Tensor]) -> set[torch.device]:
    """GPUs with room for another copy of what is on them."""
    wanted: dict[torch.device, int] = {}
    for tensor in tensors:
        if tensor.device.type == "cuda":
            wanted[tensor.device] = wanted.get(tensor.device, 0) + tensor.nbytes
    return {device for device, size in wanted.items() if torch.cuda.mem_get_info(device)[0] > size + RESERVE}
