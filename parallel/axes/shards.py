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
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from common.errors import PlanError
from models.chain import Chain, Layers, is_within
from models.cut import experts_of
from models.losses import loss_of
from parallel.axes.axis import Apart, Axis
from parallel.dtensor import split_of
from parallel.layout import Layout
from parallel.mesh import COPIES, EXPERTS, SHARDS, Mesh
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
    def is_used(cls, layout: Layout) -> bool:
        """See ``Axis.is_used``. With ``parallel.ep``, ranks along ``experts`` have shards of all other parameters."""
        return layout.shards > 1

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

        def along(*names: str) -> DeviceMesh | None:
            copies, shards = mesh.axis(COPIES), mesh.axis(*names)
            if shards.group is None:
                return None
            if copies.group is None:
                return DeviceMesh.from_group(shards.group, device, mesh_dim_names=(SHARDS,))
            ranks = mesh.axis(COPIES, *names).ranks
            return DeviceMesh.from_group(
                [copies.group, shards.group],
                device,
                mesh=[ranks[start : start + shards.size] for start in range(0, len(ranks), shards.size)],
                mesh_dim_names=(COPIES, SHARDS),
            )

        self._ranks, self._ranks_of_experts = along(SHARDS, EXPERTS), along(SHARDS) if plan.ep > 1 else None
        self._experts: set[nn.Module] = set()  # of this rank, as ``parallel.axes.experts`` has cut them
        self._left_out: set[nn.Parameter] = set()  # those of experts of which each group of shards has one copy

    def prepare(self, name: str, layer: nn.Module, tied_in_stage: Sequence[str]) -> None:
        """See ``Axis.prepare``."""
        self._experts |= {*experts_of(self.chain.cut, layer, name).values()} if self.plan.ep > 1 else set()
        if not any(is_within(parameter, [name]) for parameter in tied_in_stage):
            self._shard(layer)

    def wrap(self, stage: nn.Module, apart: Apart) -> nn.Module:
        """Shard the tied parameters, which ``prepare`` skips.

        Raises PlanError if one of them is not averaged over all replicas.
        """
        self._shard(stage)
        if apart.keys() - self._left_out:
            raise PlanError(
                f"parallel={self.plan.strategy} shards all parameters among all replicas, but an axis averages some of "
                "them over others; use parallel=ddp"
            )
        return stage

    def split(self, name: str, tensor: Tensor) -> Split | None:
        """See ``Axis.split``."""
        split = split_of(tensor)
        return split if split is None or len(split.sizes) == self.ranks.size else replace(split, axis=(SHARDS, EXPERTS))

    def _shard(self, module: nn.Module) -> None:
        """Shard a module's parameters, except for parameters of submodules that are sharded already."""
        for experts in [part for part in module.modules() if part in self._experts]:
            self._experts.remove(experts)
            if self._ranks_of_experts is None:
                self._left_out.update(experts.parameters())
            else:
                sharded = self._shard_among(self._ranks_of_experts, experts)
                # Each rank's gradient is a sum over the ranks along ``experts``. gloo cannot multiply in a reduction.
                sharded.set_force_sum_reduction_for_comms(True)
                sharded.set_gradient_divide_factor(self.plan.dp)
        if not isinstance(module, self._sharded_module) and any(True for _ in module.parameters()):
            self._shard_among(self._ranks, module)

    def _shard_among(self, ranks: Any, module: nn.Module) -> Any:
        left_out = {p for p in module.parameters() if p.numel() == 0} | self._left_out  # empty ones have no rows
        # With None the outermost module stays whole until its backward, which begins at once.
        reshard = None if self._reshard else False
        sharded = self._fsdp.fully_shard(module, mesh=ranks, ignored_params=left_out, reshard_after_forward=reshard)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
            sharded.set_reduce_scatter_unused_params(True)  # ranks may use different parameters
        if loss_of(module) is not None:  # a head that owns the loss is called through this method
            self._fsdp.register_fsdp_forward_method(module, "loss")
        return sharded

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
