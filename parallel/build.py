"""From a plan to this rank's strategy."""

from __future__ import annotations

import torch

from data.batch import Batch
from models.chain import Chain
from parallel.devices import local_device
from parallel.local import LocalStrategy
from parallel.mesh import Mesh
from parallel.plan import Plan
from parallel.shape_inference import TensorSpec, trace
from parallel.strategy import Options, Strategy


def build_strategy(
    plan: Plan, chain: Chain, mesh: Mesh, options: Options, sample: Batch, local_rank: int = 0
) -> Strategy:
    """This rank's strategy, its stages built and placed.

    mesh    connected (``Mesh.connect``)
    sample  one micro-batch, used for its shapes and dtypes only
    """
    if plan.devices:
        devices = [torch.device(d) for d in plan.devices]
    else:
        devices = [local_device(plan.device_type, local_rank)]
    if not plan.pipelined:
        return LocalStrategy(plan, chain, mesh, devices, options)
    from parallel.pipeline import Pipeline  # a second of imports that the other strategies do without

    return Pipeline(plan, chain, mesh, devices, options, borders=stage_borders(plan, chain, sample))


def stage_borders(plan: Plan, chain: Chain, sample: Batch) -> list[TensorSpec]:
    """What stages 0, 1, … receive for one micro-batch, and last the loss."""
    traced = trace(chain, sample.inputs, sample.targets, plan.precision, plan.device_type)
    output = {t.name: t.output for t in traced}
    return [TensorSpec(tuple(sample.inputs.shape), sample.inputs.dtype)] + [output[s.layers[-1]] for s in plan.stages]
