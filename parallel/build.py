"""From a plan to this rank's strategy."""

from __future__ import annotations

import torch

from data.batch import Batch
from models.chain import Chain
from parallel.devices import local_device
from parallel.mesh import Mesh
from parallel.plan import Plan
from parallel.strategies import strategy_class
from parallel.strategy import Options, Strategy


def build_strategy(
    plan: Plan, chain: Chain, mesh: Mesh, options: Options, sample: Batch | None, local_rank: int = 0
) -> Strategy:
    """Build this rank's strategy, with its stages on their devices.

    Args:
        plan: The layout of the run.
        chain: The model.
        mesh: The grid of ranks, connected (``Mesh.connect``).
        options: How stages are run.
        sample: One micro-batch, used for its shapes and dtypes only. None for a strategy without pipeline.
        local_rank: This rank's number on its machine, which says which device it takes.

    Returns:
        A strategy of the class that the registry names.
    """
    if plan.devices:
        devices = [torch.device(d) for d in plan.devices]
    else:
        devices = [local_device(plan.device_type, local_rank)]
    return strategy_class(plan.strategy)(plan, chain, mesh, devices, options, sample)
