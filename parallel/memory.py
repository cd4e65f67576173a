"""The memory that each rank of a plan will need, estimated before it is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import PlanError
from data.dataset import Batch
from models.chain import Chain
from parallel.plan import Plan
from parallel.precision import parameter_dtype
from parallel.schedules import in_flight
from parallel.shape_inference import trace

# Measured on Linux: a worker that has imported torch, its pipelining and wandb, and set gloo up.
PROCESS_BYTES = 350 * 2**20


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of one rank, in bytes.

    Attributes:
        rank: The rank.
        weights: Parameters; of shared ones, this rank's share.
        gradients: Their gradients, likewise.
        optimizer: The optimizer's state, likewise.
        gathered: Shared parameters and their gradients, as far as they are whole during a step.
        activations: What autograd holds for the micro-batches in flight, and weights cast to the compute dtype.
        process: The interpreter and its libraries (in main memory, also where a GPU computes).
    """

    rank: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    process: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations + self.process


def check_gpus(plan: Plan, tensors: int, memory: Callable[[int], int]) -> None:
    """Check that weights, gradients and optimizer state fit into the GPUs that the ranks of ``plan`` are dealt to.

    Activations are left out: only what ranks hold for sure is counted.

    Args:
        plan: The layout of a run that is started on this machine.
        tensors: How many of a parameter's size are held: of each weight, and in training its gradient and its state.
        memory: Gives the bytes of the GPU with an index.

    Raises:
        PlanError: They do not fit. The message has the numbers and a way out.
    """
    each = parameter_dtype(plan.precision).itemsize * tensors
    what = "weights" if tensors == 1 else "weights, gradients and optimizer state"
    for gpu in range(min(plan.gpus, plan.processes)):
        ranks = range(gpu, plan.processes, plan.gpus)
        meshes = [plan.mesh(rank) for rank in ranks]
        needed = each * sum(s.parameters / mesh.shards for mesh in meshes for s in plan.stages_of(mesh.position))
        if needed > memory(gpu):
            who = f"rank {gpu} needs" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} together need"
            raise PlanError(
                f"{who} {needed / 2**30:.1f} GiB of cuda:{gpu} for {what} alone, and it has "
                f"{memory(gpu) / 2**30:.1f} GiB; choose a smaller model, or fewer replicas (parallel.dp), or "
                "device=cpu"
            )


def stage_activations(plan: Plan, chain: Chain, sample: Batch) -> list[int]:
    """Estimate the bytes that each stage holds between forwards and backwards.

    They are what autograd keeps for the micro-batches in flight, and the weights cast to the compute dtype.
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


def estimate_memory(plan: Plan, chain: Chain, sample: Batch, states: int) -> list[MemoryEstimate]:
    """Estimate the memory of each rank, whose optimizer keeps ``states`` tensors of each parameter's size."""
    held = stage_activations(plan, chain, sample)
    layers = [sum(p.numel() for p in layer.parameters()) for _, layer in chain.skeleton().items()]
    largest = max(layers) * parameter_dtype(plan.precision).itemsize
    estimates = []
    for rank in range(plan.processes):
        stages = plan.stages_of(plan.mesh(rank).position)
        whole = sum(stage.parameters for stage in stages) * parameter_dtype(plan.precision).itemsize
        share = -(-whole // plan.mesh(rank).shards)
        gathered = _gathered(plan, whole, largest) if share < whole else 0
        activations = sum(held[stage.index] for stage in stages)
        estimates.append(MemoryEstimate(rank, share, share, states * share, gathered, activations, PROCESS_BYTES))
    return estimates


def _gathered(plan: Plan, whole: int, largest: int) -> int:
    """Estimate the bytes of shared parameters and gradients that are whole during a step.

    ``whole`` is the size of all parameters of the rank's stages in bytes, ``largest`` that of the largest layer.
    """
    # A layer at a time: one computes and the next is fetched. Its gradients lie in a buffer to be reduced, too.
    weights = min(whole, 2 * largest) if plan.reshard else whole
    reduced_once = plan.pipelined or (not plan.reshard and plan.chunks > 1)
    return weights + (whole if reduced_once else min(whole, 2 * largest))
