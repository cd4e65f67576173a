"""Parameters, gradients and optimizer state sharded among replicas, by torch's FSDP2 (``fully_shard``).

This module avoids these pitfalls of FSDP2:
* Wrapping a module replaces its parameters, and so does gathering them, so earlier references to them become stale.
  Stages are therefore sharded while they are built, and parameters are looked up by name.
* Layers of a stage that share a weight cannot be sharded one by one. They are sharded together with the stage.
* An evaluation has no backward, so whole parameters stay registered after it, and the sharded gradients would not be
  cleared. ``end_step`` therefore frees whole parameters after every evaluation step.
* A layer's gradients are reduced when its backward ends. If autocast kept the cast of a weight from an earlier
  micro-batch, the weight would get its gradient later. ``parallel.strategy`` therefore lets autocast keep no casts.
* torch's pipelines reduce a stage's gradients once, after the stage's last backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from common.errors import PlanError
from models.chain import Chain, Layers, is_within
from models.losses import loss_of
from parallel.axes.axis import Apart, Axis
from parallel.dtensor import split_of
from parallel.layout import Layout
from parallel.mesh import COPIES, REPLICAS, SHARDS, Mesh
from parallel.placement import Split
from parallel.plan import Plan


class Shards(Axis):
    """Divides parameters, gradients and optimizer state among replicas.

    With ``plan.reshard`` parameters are gathered one layer at a time, in the forward and again in the backward, and
    gradients are reduced after every micro-batch. Otherwise parameters stay whole from the first forward to the last
    backward, and gradients are reduced once.
    """

    mesh_axes = (SHARDS,)
    keys = ("strategy",)

    @classmethod
    def check(cls, layout: Layout, chain: Chain, skeleton: Layers) -> None:
        """Raise PlanError if a parameter is a scalar, which has no rows to shard."""
        numbers = (name for name, parameter in skeleton.named_parameters() if parameter.dim() == 0)
        if layout.info.sharded and (name := next(numbers, None)) is not None:
            raise PlanError(
                f"parallel={layout.strategy} shares the rows of each parameter, but {name} is a single number; give it "
                "the shape (1,)"
            )

    def __init__(self, name: str, plan: Plan, chain: Chain, mesh: Mesh) -> None:
        """See ``Axis``."""
        super().__init__(name, plan, chain, mesh)
        from torch.distributed import fsdp  # here, because it imports DTensor, which takes a second
        from torch.distributed.device_mesh import DeviceMesh

        self._fsdp, self._sharded_module = fsdp, fsdp.FSDPModule
        self._reshard, device = bool(plan.reshard), plan.device_type
        # Code that would change a returned view in place gets a copy (``Stage``).
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        copies, shards = mesh.axis(COPIES), mesh.axis(SHARDS)
        assert shards.group is not None  # there are other ranks
        if copies.group is None:
            self._ranks = DeviceMesh.from_group(shards.group, device, mesh_dim_names=(SHARDS,))
        else:
            replicas = mesh.axis(*REPLICAS).ranks
            self._ranks = DeviceMesh.from_group(
                [copies.group, shards.group],
                device,
                mesh=[replicas[start : start + shards.size] for start in range(0, len(replicas), shards.size)],
                mesh_dim_names=(COPIES, SHARDS),
            )

    def prepare(self, name: str, layer: nn.Module, tied_in_stage: Sequence[str]) -> None:
        """See ``Axis.prepare``."""
        if not any(is_within(parameter, [name]) for parameter in tied_in_stage):
            self._shard(layer)

    def wrap(self, stage: nn.Module, apart: Apart) -> nn.Module:
        """Shard the tied parameters, which ``prepare`` skips.

        Raises PlanError if one of them is not averaged over all replicas.
        """
        if apart:
            raise PlanError(
                f"parallel={self.plan.strategy} shards all parameters among all replicas, but an axis averages some of "
                "them over others; use parallel=ddp"
            )
        self._shard(stage)
        return stage

    def split(self, name: str, tensor: Tensor) -> Split | None:
        """See ``Axis.split``."""
        return split_of(tensor)

    def _shard(self, module: nn.Module) -> None:
        """Shard a module's parameters, except for parameters of submodules that are sharded already."""
        if not any(True for _ in module.parameters()):
            return
        empty = {p for p in module.parameters() if p.numel() == 0}  # these have no rows to divide
        # With None the outermost module stays whole until its backward, which begins at once.
        reshard = None if self._reshard else False
        sharded = self._fsdp.fully_shard(module, mesh=self._ranks, ignored_params=empty, reshard_after_forward=reshard)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
            sharded.set_reduce_scatter_unused_params(True)  # ranks may use different parameters
        if loss_of(module) is not None:  # a head that owns the loss is called through this method
            self._fsdp.register_fsdp_forward_method(module, "loss")

    def before_backward(self, stages: Iterable[nn.Module], last: bool) -> None:
        """Set how the next micro-batch's gradients are reduced, and whether its backward frees whole parameters."""
        for stage in stages:
            if not isinstance(stage, self._sharded_module):  # it has no parameters
                continue
            # Without ``reshard`` each backward is treated as the last one. Otherwise torch would prefetch in the order
            # of all micro-batches' forwards, and gather a layer whose backward is done.
            stage.set_is_last_backward(last or not self._reshard)
            stage.set_reshard_after_backward(self._reshard or last)
            stage.set_requires_gradient_sync(self._reshard or last)
            stage.set_requires_all_reduce(last)

    def end_step(self, stages: Iterable[nn.Module], training: bool) -> None:
        """Free whole parameters after a step without a backward."""
        for module in (module for stage in stages if not training for module in stage.modules()):
            if isinstance(module, self._sharded_module):
                module.reshard()
