"""What each rank of a plan will need, before it is started."""

from __future__ import annotations

from dataclasses import dataclass

from data.batch import Batch
from models.chain import Chain
from parallel.plan import Plan
from parallel.precision import parameter_dtype
from parallel.schedules import in_flight
from parallel.shape_inference import trace

# Measured on Linux: a worker that has imported torch, its pipelining and wandb, and set gloo up.
PROCESS_BYTES = 350 * 2**20

# Tensors of a parameter's size that each optimizer keeps.
_STATES = {"SGD": 0, "Adam": 2, "AdamW": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank. ``activations``: what autograd holds for the micro-batches in flight, and weights cast to
    the compute dtype; ``process``: the interpreter and its libraries (in main memory, also where a GPU computes)."""

    rank: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    process: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.process


def tensors_per_parameter(optim) -> int:
    """The weight, its gradient, and what the optimizer of this configuration section keeps."""
    kind = optim["_target_"].rpartition(".")[2]
    return 2 + _STATES.get(kind, 2) + (1 if kind == "SGD" and optim["momentum"] else 0)


def stage_activations(plan: Plan, chain: Chain, sample: Batch) -> list[int]:
    """For each stage, the bytes that it holds between forwards and backwards: what autograd keeps for the micro-batches
    that the schedule has in flight there, and the weights cast to the compute dtype.

    sample  one micro-batch, for its shapes
    """
    traced = {t.name: t for t in trace(chain, sample, plan.precision, plan.device_type)}
    sizes = []
    for stage in plan.stages:
        held = 1
        if plan.pipelined:
            position = stage.index % plan.pp
            held = in_flight(plan.schedule, plan.pp, plan.chunks, plan.stages_per_rank, position)
        layers = [traced[name] for name in stage.layers]
        sizes.append(held * sum(t.kept + t.output_bytes for t in layers) + sum(t.cast for t in layers))
    return sizes


def estimate_memory(plan: Plan, chain: Chain, sample: Batch, optim) -> list[MemoryEstimate]:
    """One estimate a rank.

    sample  one micro-batch, for its shapes
    optim   the configuration section: its target, and momentum for SGD
    """
    held = stage_activations(plan, chain, sample)
    states = tensors_per_parameter(optim) - 2
    estimates = []
    for rank in range(plan.processes):
        stages = plan.stages_of(plan.mesh(rank).position)
        weights = sum(stage.parameters for stage in stages) * parameter_dtype(plan.precision).itemsize
        activations = sum(held[stage.index] for stage in stages)
        estimates.append(MemoryEstimate(rank, weights, weights, states * weights, activations, PROCESS_BYTES))
    return estimates
