"""Parameters, gradients and optimizer state shared among replicas, by torch's FSDP2 (``fully_shard``).

What goes wrong with it, and what is done about it here:
* Wrapping replaces a module's parameters, and again while they are whole: nothing may hold on to those from before.
  Stages are sharded while they are built, and parameters are looked up by name.
* A layer whose weight another layer of the stage shares cannot be sharded alone: both are left to the stage itself.
* Whole parameters stay registered after an evaluation, whose backward never comes. The sharded gradients would not be
  cleared then: ``reshard`` after every step of evaluation.
* A layer's gradients are reduced when its backward ends. A weight whose cast autocast has kept from an earlier
  micro-batch gets its gradient later than that: ``parallel.strategy`` has autocast keep none.
* torch's pipelines reduce a stage's gradients once, after its last backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.mesh import COPIES, REPLICAS, SHARDS, Mesh
from parallel.stage import Stage


class Sharding:
    """The shares of one rank."""

    def __init__(self, mesh: Mesh, device_type: str, reshard: bool) -> None:
        """Describe the ranks that share.

        With ``reshard`` the layers of a step are whole one at a time, in the forward and again in the backward, and
        gradients are reduced after every micro-batch. Without it they are whole from the first forward to the last
        backward, and gradients are reduced once.
        """
        from torch.distributed import fsdp  # imports DTensor: a second
        from torch.distributed.device_mesh import DeviceMesh

        self._fsdp, self._reshard = fsdp, reshard
        copies, shards = mesh.axis(COPIES), mesh.axis(SHARDS)
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
        """Keep this rank's share of a module's parameters; those of its parts that are sharded already stay so."""
        if not any(True for _ in module.parameters()):
            return
        empty = {p for p in module.parameters() if p.numel() == 0}  # there is nothing to share
        # None: the outermost module is whole until its backward, which begins at once.
        reshard = None if self._reshard else False
        self._fsdp.fully_shard(module, mesh=self._ranks, ignored_params=empty, reshard_after_forward=reshard)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
            module.set_reduce_scatter_unused_params(True)  # ranks may differ in what they use
        if hasattr(module, "loss"):  # a head that owns the loss is called by that name
            self._fsdp.register_fsdp_forward_method(module, "loss")

    def before_backward(self, stages: Iterable[Stage], last: bool) -> None:
        """Say how the next micro-batch's gradients are reduced, and whether its backward frees whole parameters."""
        for stage in self._sharded(stages):
            # With nothing to reduce, each backward ends as the last one does: torch would prefetch by the order of all
            # micro-batches' forwards, and gather a layer that is done with.
            stage.set_is_last_backward(last or not self._reshard)
            stage.set_reshard_after_backward(self._reshard or last)
            stage.set_requires_gradient_sync(self._reshard or last)
            stage.set_requires_all_reduce(last)

    def reshard(self, stages: Iterable[Stage]) -> None:
        """Free the whole parameters that no backward will free."""
        for stage in stages:
            for module in stage.modules():
                if isinstance(module, self._fsdp.FSDPModule):
                    module.reshard()

    def _sharded(self, stages: Iterable[Stage]) -> list[Stage]:
        return [stage for stage in stages if isinstance(stage, self._fsdp.FSDPModule)]  # one may have no parameters


class Rows(NamedTuple):
    """The part ``tensor`` of a tensor that this rank holds, with the memory of the original.

    ``start`` is the first of its rows (positions along the first dimension) in the whole tensor, which has the shape
    ``shape``; ``shared`` says whether other ranks hold other rows.
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
    """Copy this rank's rows of ``given`` into ``tensor``, which may be shared.

    ``given`` is a tensor of the same shape, or what has its shape and gives rows of it for a slice. Raises ValueError
    where it has another shape or kind of number, or numbers beyond ``tensor``'s format.
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
