"""Parameters, gradients and optimizer state shared among replicas, by torch's FSDP2 (``fully_shard``).

FSDP2 has pitfalls that are avoided here:
* Wrapping replaces a module's parameters, and so does gathering them, which makes earlier references to them stale.
  Stages are therefore sharded while they are built, and parameters are looked up by name.
* Layers of a stage that share a weight cannot be sharded one by one. They are sharded together with the stage.
* Whole parameters stay registered after an evaluation, which has no backward, and the sharded gradients would not be
  cleared. ``reshard`` is therefore called after every step of evaluation.
* A layer's gradients are reduced when its backward ends. A weight whose cast autocast has kept from an earlier
  micro-batch would get its gradient later. ``parallel.strategy`` therefore lets autocast keep no casts.
* torch's pipelines reduce a stage's gradients once, after its last backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.mesh import COPIES, REPLICAS, SHARDS, Mesh
from parallel.stage import Stage

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

Box = slice | tuple[slice, ...] | EllipsisType  # rows, a range in each dimension, or the whole tensor


class Boxes(Protocol):
    """A tensor, or a reader of a tensor in a file, from which boxes can be taken."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        ...

    def __getitem__(self, box: Box, /) -> Tensor: ...


class Sharding:
    """The shares of one rank."""

    def __init__(self, mesh: Mesh, device_type: str, reshard: bool) -> None:
        """Describe the ranks that share parameters.

        With ``reshard`` parameters are gathered one layer at a time, in the forward and again in the backward, and
        gradients are reduced after every micro-batch. Without it parameters stay whole from the first forward to the
        last backward, and gradients are reduced once.
        """
        from torch.distributed import fsdp  # here, because it imports DTensor, which takes a second
        from torch.distributed.device_mesh import DeviceMesh

        self._sharded_module, self._reshard = fsdp.FSDPModule, reshard
        copies, shards = mesh.axis(COPIES), mesh.axis(SHARDS)
        assert shards.group is not None  # there are others to share with
        if copies.group is None:
            self._ranks = DeviceMesh.from_group(shards.group, device_type, mesh_dim_names=(SHARDS,))
        else:
            replicas = mesh.axis(*REPLICAS).ranks
            self._ranks = DeviceMesh.from_group(
                [copies.group, shards.group],
                device_type,
                mesh=[replicas[start : start + shards.size] for start in range(0, len(replicas), shards.size)],
                mesh_dim_names=(COPIES, SHARDS),
            )

    def shard(self, module: nn.Module) -> None:
        """Reduce a module's parameters to this rank's share. Submodules that are sharded already stay as they are."""
        from torch.distributed import fsdp

        if not any(True for _ in module.parameters()):
            return
        empty = {p for p in module.parameters() if p.numel() == 0}  # these have no rows to share
        # With None the outermost module stays whole until its backward, which begins at once.
        reshard = None if self._reshard else False
        sharded = fsdp.fully_shard(module, mesh=self._ranks, ignored_params=empty, reshard_after_forward=reshard)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
            sharded.set_reduce_scatter_unused_params(True)  # ranks may differ in what they use
        if hasattr(module, "loss"):  # a head that owns the loss is called by that name
            fsdp.register_fsdp_forward_method(module, "loss")

    def before_backward(self, stages: Iterable[Stage], last: bool) -> None:
        """Set how the next micro-batch's gradients are reduced, and whether its backward frees whole parameters."""
        for stage in self._sharded(stages):
            # Without ``reshard`` each backward is treated as the last one. Otherwise torch would prefetch in the order
            # of all micro-batches' forwards, and gather a layer whose backward is done.
            stage.set_is_last_backward(last or not self._reshard)
            stage.set_reshard_after_backward(self._reshard or last)
            stage.set_requires_gradient_sync(self._reshard or last)
            stage.set_requires_all_reduce(last)

    def reshard(self, stages: Iterable[Stage]) -> None:
        """Free whole parameters after a step without a backward."""
        for stage in stages:
            for module in stage.modules():
                if isinstance(module, self._sharded_module):
                    module.reshard()

    def _sharded(self, stages: Iterable[Stage]) -> list[FSDPModule]:
        return [stage for stage in stages if isinstance(stage, self._sharded_module)]  # not if it has no parameters


class Piece(NamedTuple):
    """The box of a tensor that this rank holds.

    Attributes:
        tensor: Its numbers, which share the memory of the original.
        start: The index at which it begins in each dimension of the whole tensor.
        shape: The shape of the whole tensor.
        axes: The axes of the mesh that cut the tensor; empty if this rank holds the whole tensor.
    """

    tensor: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...] = ()

    @property
    def box(self) -> tuple[slice, ...]:
        """The index of this box in the whole tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.tensor.shape, strict=True))

    def counts(self, mesh: Mesh) -> bool:
        """Return whether this rank counts and saves the box. Other ranks that hold the same box do not."""
        return mesh.counts(self.axes)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, with the same memory. A tensor that is not shared is returned as it is."""
    return tensor.to_local() if _is_shared(tensor) else tensor


def piece_of(tensor: Tensor) -> Piece:
    """Return which box of a tensor this rank holds."""
    start, size, axes = [0] * tensor.dim(), list(tensor.shape), []
    if _is_shared(tensor):
        mesh = tensor.device_mesh
        names, here = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
        for axis, ranks, index, placement in zip(names, mesh.shape, here, tensor.placements, strict=True):
            if placement.is_shard():
                dim = placement.dim  # pyright: ignore[reportAttributeAccessIssue]  # is_shard() has checked it
                each = -(-size[dim] // ranks)  # as torch.chunk cuts
                before = min(each * index, size[dim])
                start[dim] += before
                size[dim] = min(each, size[dim] - before)
                axes.append(axis)
    return Piece(local(tensor), tuple(start), tuple(tensor.shape), tuple(axes))


@torch.no_grad()
def fill(tensor: Tensor, given: Boxes, name: str) -> None:
    """Copy this rank's box of ``given`` into ``tensor``, which may be shared.

    Raises ValueError if ``given`` has another shape or kind of number, or numbers too large for the tensor's dtype.
    """
    if given.shape != tensor.shape:
        raise ValueError(f"{name} has {tuple(given.shape)}, expected {tuple(tensor.shape)}")
    part, box = local(tensor), cut_like(tensor, given)
    floating = part.is_floating_point()
    if box.dtype != part.dtype and not (floating and box.is_floating_point()):
        raise ValueError(f"{name} holds {box.dtype}, expected {part.dtype}")
    part.copy_(box)
    narrower = floating and torch.finfo(box.dtype).max > torch.finfo(part.dtype).max
    if narrower and not torch.equal(part.isfinite(), box.isfinite().to(part.device)):
        raise ValueError(f"{name} holds {box.dtype} numbers that are too large for {part.dtype}")


def cut_like(like: Tensor, given: Boxes) -> Tensor:
    """Return the box of ``given`` that this rank holds of ``like``."""
    piece = piece_of(like)
    return given[piece.box] if piece.axes else given[...]


def whole(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Return the whole tensor, or a copy if it is cut into rows along an axis. All ranks along that axis call this.

    ``full_tensor`` is not used, because DTensor keeps the process groups of an earlier run in the same process.
    """
    part, _, shape, axes = piece_of(tensor)
    if not axes:
        return part
    (axis,) = axes
    line = mesh.axis(axis)
    padded = part.new_zeros(-(-shape[0] // line.size), *shape[1:])
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in range(line.size)]
    dist.all_gather(parts, padded, group=line.group)
    return torch.cat(parts)[: shape[0]]


def shared_like(like: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that is shared as ``like`` is, and of which this rank holds ``part``."""
    if not _is_shared(like):
        return part
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _is_shared(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "placements")
