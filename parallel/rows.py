"""Tensors of which this rank holds some rows, as FSDP2 shares parameters, gradients and optimizer state out.

They are DTensors. What is here also works for tensors that are not shared, and does not import
``torch.distributed.tensor``, which takes a second.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Rows(NamedTuple):
    """The part of a tensor that this rank holds.

    Attributes:
        tensor: The part, with the memory of the original.
        start: The first of its rows (positions along the first dimension) in the whole tensor.
        shape: Of the whole tensor.
        shared: Whether other ranks hold other rows.
    """

    tensor: Tensor
    start: int
    shape: tuple[int, ...]
    shared: bool


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, with the same memory; a tensor that is not shared as it is."""
    return tensor.to_local() if _is_shared(tensor) else tensor


def rows_of(tensor: Tensor) -> Rows:
    """Return which rows of a tensor this rank holds."""
    part, shape = local(tensor), tuple(tensor.shape)
    if not _is_shared(tensor) or not tensor.placements[-1].is_shard(0):
        return Rows(part, 0, shape, shared=False)
    mesh = tensor.device_mesh
    each = -(-shape[0] // mesh.size(mesh.ndim - 1))  # as torch.chunk cuts
    return Rows(part, min(each * mesh.get_coordinate()[-1], shape[0]), shape, shared=True)


@torch.no_grad()
def fill(tensor: Tensor, given: Tensor, name: str) -> None:
    """Copy this rank's rows of ``given`` into ``tensor``.

    Args:
        tensor: Shared or not.
        given: A tensor of the same shape, or what has its shape and gives rows of it for a slice.
        name: The tensor's name, for the error.

    Raises:
        ValueError: ``given`` has another shape or another kind of number, or numbers beyond ``tensor``'s format.
    """
    if given.shape != tensor.shape:
        raise ValueError(f"{name} has {tuple(given.shape)}, expected {tuple(tensor.shape)}")
    part, rows = local(tensor), rows_in(given, tensor)
    floating = part.is_floating_point()
    if rows.dtype != part.dtype and not (floating and rows.is_floating_point()):
        raise ValueError(f"{name} holds {rows.dtype}, expected {part.dtype}")
    part.copy_(rows)
    narrower = floating and torch.finfo(rows.dtype).max > torch.finfo(part.dtype).max
    if narrower and not torch.equal(part.isfinite(), rows.isfinite().to(part.device)):
        raise ValueError(f"{name} holds {rows.dtype} beyond what {part.dtype} can express")


def rows_in(given: Tensor, like: Tensor) -> Tensor:
    """Return those rows of ``given`` that this rank holds of ``like``. The arguments are those of ``fill``."""
    part, start, _, shared = rows_of(like)
    return given[start : start + len(part)] if shared else given[...]


def whole(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return all rows of a tensor; a copy where it is shared. All ranks of ``group``, which share it, call this.

    Not ``full_tensor``: DTensor remembers the process groups of an earlier run in the same process.
    """
    part, _, shape, shared = rows_of(tensor)
    if not shared:
        return part
    padded = part.new_zeros(-(-shape[0] // group.size()), *shape[1:])
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)[: shape[0]]


def shared_like(like: Tensor, part: Tensor) -> Tensor:
    """Return the tensor of which this rank holds ``part``, shared as ``like`` is."""
    return type(like.data).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _is_shared(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")
