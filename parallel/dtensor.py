"""The placement of a DTensor of FSDP2. Only this module knows DTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from parallel.placement import Split

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether replicas have shards of a tensor. DTensor is not imported, because its import takes a second."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory. A tensor without shards is returned unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def split_of(tensor: Tensor) -> Split | None:
    """Return the division of a tensor among replicas; None if each replica has the whole tensor.

    FSDP2 shards along one axis of its mesh and replicates along the other.
    """
    if not is_sharded(tensor):
        return None
    mesh = tensor.device_mesh
    for axis, ranks, placement in zip(mesh.mesh_dim_names or (), mesh.shape, tensor.placements, strict=True):
        if placement.is_shard():
            dim: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue]  # is_shard() has checked it
            each = -(-tensor.shape[dim] // ranks)  # as torch.chunk divides
            ends = [min(each * index, tensor.shape[dim]) for index in range(ranks + 1)]
            return Split(axis, dim, tuple(stop - start for start, stop in zip(ends, ends[1:], strict=False)))
    return None
