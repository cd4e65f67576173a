"""Groups of neighbouring replicas: those that share parameters, or that reduce gradients among themselves first."""

from __future__ import annotations

from torch import nn

from common.errors import PlanError
from parallel.averaging import HIERARCHICAL
from parallel.mesh import Mesh
from parallel.schedules import SCHEDULES
from parallel.strategies import StrategyInfo, names_where


def check_groups(parallel, info: StrategyInfo, mesh: Mesh, nodes: int) -> tuple[int, bool]:
    """Choose the size of the groups.

    Args:
        parallel: The configuration section.
        info: What its strategy is.
        mesh: The grid of ranks.
        nodes: The number of machines, with equally many ranks each.

    Returns:
        How many replicas form a group, and whether shared parameters are whole one layer at a time.

    Raises:
        PlanError: With the numbers and a way out.
    """
    name, dp, wanted = parallel.name, mesh.dp, parallel.shard
    hierarchical = parallel.comm_hook in HIERARCHICAL
    if info.sharded and parallel.comm_hook != "none":
        raise PlanError(
            f"parallel.comm_hook={parallel.comm_hook} is for replicas with parameters of their own, and "
            f"parallel={name} shares them: leave it out"
            + (" (parallel=hsdp reduces gradients that way by itself)" if hierarchical else "")
        )
    if not info.sharded:
        _check_unused(parallel, hierarchical)
        if not hierarchical or dp == 1:
            return 1, False
    if wanted is None:
        group = dp if info.shards == "all" else _replicas_per_node(parallel, mesh, nodes)
    else:
        group = wanted
        if group < 1 or dp % group:
            sizes = ", ".join(str(n) for n in range(1 if dp == 1 else 2, dp + 1) if dp % n == 0)
            raise PlanError(
                f"parallel.shard={group} does not divide parallel.dp={dp} replicas into equal groups; "
                f"groups can have {sizes}"
            )
    if group == 1 and dp > 1 and info.sharded:
        raise PlanError(
            f"parallel={name} with groups of one replica shares nothing "
            + (f"(each of {nodes} nodes has one)" if wanted is None else "(parallel.shard=1)")
            + f"; set parallel.shard={dp} to share among all, or use parallel="
            + _unsharded(info)
        )
    return group, _reshard(parallel, info)


def _check_unused(parallel, hierarchical: bool) -> None:
    if parallel.shard is not None and not hierarchical:
        known = " or ".join(f"parallel={name}" for name in names_where(sharded=True))
        raise PlanError(
            f"parallel.shard={parallel.shard} is the size of the groups of {known}, and of "
            f"parallel.comm_hook=hierarchical; parallel={parallel.name} has none"
        )
    if parallel.reshard is not None:
        known = " or ".join(f"parallel={name}" for name in names_where(sharded=True))
        raise PlanError(
            f"parallel.reshard={str(parallel.reshard).lower()} is for {known}; parallel={parallel.name} shares no "
            "parameters"
        )


def _replicas_per_node(parallel, mesh: Mesh, nodes: int) -> int:
    per_node = mesh.size // nodes
    sizes = set()
    for position in range(mesh.pp):
        on = [rank // max(per_node, 1) for rank in mesh.replicas(position)]
        sizes |= {on.count(node) for node in on}
    if mesh.size % nodes or len(sizes) != 1:
        raise PlanError(
            f"the {mesh.dp} replicas do not lie on {nodes} nodes in equal groups; set parallel.shard to the size of "
            f"the groups, such as parallel.shard={mesh.dp}"
        )
    return sizes.pop()


def _reshard(parallel, info: StrategyInfo) -> bool:
    if not info.sharded:
        return False
    if not info.stage_per_rank:
        return parallel.reshard is not False
    if parallel.reshard and SCHEDULES[parallel.schedule].splits_backward:
        raise PlanError(
            f"parallel.reshard=true with parallel.schedule={parallel.schedule} is refused: the weights' gradients are "
            "computed when the layer's parameters are no longer whole, and would be lost; leave it out, or use "
            "parallel.schedule=interleaved_1f1b"
        )
    return bool(parallel.reshard)


def _unsharded(info: StrategyInfo) -> str:
    return names_where(sharded=False, replicas=True, stages=info.stages)[0]


def check_shardable(strategy: str, skeleton: nn.Module) -> None:
    """Check that parameters have rows to share. Raises PlanError."""
    scalars = [name for name, parameter in skeleton.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise PlanError(
            f"parallel={strategy} shares the rows of each parameter, and {scalars[0]} is a single number; give it the "
            "shape (1,)"
        )
