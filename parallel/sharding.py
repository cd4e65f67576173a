"""Parameters, gradients and optimizer state sharded among replicas, by torch's FSDP2 (``fully_shard``).

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

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from models.losses import loss_of
from parallel.mesh import COPIES, REPLICAS, SHARDS, Mesh
from parallel.stage import Stage

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Sharding:
    """The shards of one rank."""

    def __init__(self, mesh: Mesh, device_type: str, reshard: bool) -> None:
        """Describe the ranks that have shards.

        With ``reshard`` parameters are gathered one layer at a time, in the forward and again in the backward, and
        gradients are reduced after every micro-batch. Without it parameters stay whole from the first forward to the
        last backward, and gradients are reduced once.
        """
        from torch.distributed import fsdp  # here, because it imports DTensor, which takes a second
        from torch.distributed.device_mesh import DeviceMesh

        self._sharded_module, self._reshard = fsdp.FSDPModule, reshard
        # Who would change such a view in place gets a copy (``Stage``).
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        copies, shards = mesh.axis(COPIES), mesh.axis(SHARDS)
        assert shards.group is not None  # there are other ranks
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
        """Reduce a module's parameters to this rank's shard. Submodules that are sharded already stay as they are."""
        from torch.distributed import fsdp

        if not any(True for _ in module.parameters()):
            return
        empty = {p for p in module.parameters() if p.numel() == 0}  # these have no rows to divide
        # With None the outermost module stays whole until its backward, which begins at once.
        reshard = None if self._reshard else False
        sharded = fsdp.fully_shard(module, mesh=self._ranks, ignored_params=empty, reshard_after_forward=reshard)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
            sharded.set_reduce_scatter_unused_params(True)  # ranks may differ in what they use
        if loss_of(module) is not None:  # a head that owns the loss is called by that name
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
