"""What each rank of a plan will need, before it is started."""

from __future__ import annotations

from dataclasses import dataclass

from data.batch import Batch
from models.chain import Chain
from parallel.plan import Plan
from parallel.precision import parameter_dtype
from parallel.schedules import in_flight
from parallel.trace import trace

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


def estimate_memory(plan: Plan, chain: Chain, sample: Batch, optim) -> list[MemoryEstimate]:
    """One estimate a rank.

    sample  one micro-batch, for its shapes
    optim   the configuration section: its target, and momentum for SGD
    """
    traced = {t.name: t for t in trace(chain, sample.inputs, sample.targets, plan.precision, plan.device_type)}
    kind = optim["_target_"].rpartition(".")[2]
    states = _STATES.get(kind, 2) + (1 if kind == "SGD" and optim["momentum"] else 0)
    estimates = []
    for rank in range(plan.processes):
        position = plan.mesh(rank).position
        weights = activations = 0
        for stage in plan.stages_of(position):
            weights += stage.parameters * parameter_dtype(plan.precision).itemsize
            held = 1
            if plan.pipelined:
                held = in_flight(plan.schedule, plan.pp, plan.chunks, plan.stages_per_rank, position)
            layers = [traced[name] for name in stage.layers]
            activations += held * sum(t.kept + t.output.bytes for t in layers) + sum(t.cast for t in layers)
        estimates.append(MemoryEstimate(rank, weights, weights, states * weights, activations, PROCESS_BYTES))
    return estimates
