"""The memory of a rank, by part. mode=plan, parallel=auto, parallel.balance=size and the checks use this one formula.

Weights, gradients and optimizer state are counted from the model's parameters alone (``work.weights_of``). The other
parts also need the layers' activations, which are counted on tensors without memory (``work.work_of``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from common.errors import PlanError
from parallel.devices import parameter_dtype
from parallel.plan import Plan
from parallel.schedules import in_flight
from planner.cluster import BYTES
from planner.layout import PlannedLayout, cut
from planner.work import Works, parameters_of, shares, stored_besides

# Measured on Linux: a worker that has imported torch, its pipelining and wandb, and has set up gloo.
PROCESS_BYTES = 350 * 2**20
# The memory that parallel.devices.keep_freed_memory keeps, fitted to runs of four small models; see Allocation.
_HEAP, _COPIES = 0.25, (2, 6, 4)


@dataclass(frozen=True)
class Allocation:
    """The quantities on which memory depends, besides the layers and the layout.

    Attributes:
        number: Bytes per number of a weight, its gradient and the optimizer state.
        gathered: Bytes per number of a sharded parameter or gradient during communication.
        process: Bytes of a rank without a model.
        activation: Bytes per number of the inputs of products.
        heap: Extra bytes of an allocator that keeps freed memory, as a fraction of the tensors' bytes.
        copies: The number of copies that this allocator keeps of the tensors exchanged by replicas: gradients in ddp,
            and in fsdp parameters that are whole for a layer or for a step.
    """

    number: int = 4
    gathered: int = 4
    process: float = PROCESS_BYTES
    activation: int = 4
    heap: float = 0.0
    copies: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def here(cls, precision: str, device_type: str, process: float = PROCESS_BYTES) -> Allocation:
        """Return the allocation of a run on a device type: cpu, cuda or mps."""
        number = parameter_dtype(precision).itemsize
        kept = (_HEAP, _COPIES) if device_type == "cpu" else (0.0, (0, 0, 0))
        return cls(number, number, process, BYTES.get(precision, number), *kept)  # a job's auto cannot be known here


@dataclass(frozen=True)
class Memory:
    """The memory of a rank in bytes. Of a sharded or split tensor, only this rank's part counts.

    Attributes:
        weights: All parameters.
        gradients: The gradients of the trained parameters.
        optimizer: The optimizer state.
        gathered: Sharded parameters and their gradients while they are whole during a step.
        cast: Weights in the compute dtype, once for all micro-batches of a step.
        activations: The activations of the micro-batches in flight.
        recomputed: The activations of the layer that is being recomputed.
        process: The process without the model. This is main memory, even if a GPU computes.
        allocator: Freed memory that the allocator keeps.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    cast: float
    activations: float
    recomputed: float
    process: float
    allocator: float

    @property
    def state(self) -> float:
        """The bytes of weights, gradients and optimizer state, which are known without running a layer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def kept(self) -> float:
        """The bytes held between forward and backward."""
        return self.activations + self.recomputed + self.cast

    @property
    def of_layers(self) -> float:
        """The bytes of the parts to which each layer contributes separately. Layers can be balanced by them."""
        return self.state + self.cast + self.activations

    @property
    def used(self) -> float:
        """The bytes of all parts except ``allocator``, which was fitted to small models on CPUs."""
        return self.state + self.gathered + self.kept + self.process

    @property
    def total(self) -> float:
        """The bytes of all parts."""
        return self.used + self.allocator


def fullest(layers: Works, layout: PlannedLayout, allocation: Allocation, states: float | None = 2) -> Memory:
    """Predict the memory of the rank that needs the most memory.

    Args:
        layers: The layers' work.
        layout: The layout.
        allocation: The quantities on which memory depends.
        states: The average number of optimizer states per trained parameter, each of the parameter's size (Adam: 2);
            None if nothing is trained.
    """
    return max(Rank(layers, layout, allocation, states).positions(), key=lambda memory: memory.total)


def memory_of_ranks(plan: Plan, layers: Works, states: float | None) -> list[Memory]:
    """Predict the memory of each rank of a run from its layers' work, or from their weights alone."""
    positions = Rank.of_plan(plan, layers, states).positions()
    return [positions[plan.mesh(rank).position] for rank in range(plan.processes)]


@dataclass(frozen=True)
class Rank:
    """A rank of a layout.

    Attributes:
        layers: The layers' work.
        layout: The layout.
        allocation: The quantities on which memory depends.
        states: The average number of optimizer states per trained parameter; see ``fullest``.
    """

    layers: Works
    layout: PlannedLayout
    allocation: Allocation
    states: float | None

    @classmethod
    def of_plan(cls, plan: Plan, layers: Works, states: float | None) -> Rank:
        """Return the rank of a run's plan, from its layers' work, or from their weights alone."""
        allocation = Allocation.here(plan.precision, plan.device_type)
        return cls(layers, PlannedLayout.of_plan(plan), allocation, states)

    @cached_property
    def parts(self) -> Works:
        """The rank's part of each layer's work."""
        return shares(self.layers, self.layout)

    @cached_property
    def largest(self) -> float:
        """The number of parameters of the largest part."""
        return max(work.parameters for work in self.parts)

    def positions(self) -> list[Memory]:
        """Return the memory of the rank at each position of the pipeline."""
        stages, count = cut(self.parts, self.layout), self.layout.pp if self.layout.pipelined else 1
        return [self.holding(stages[position::count], position) for position in range(count)]

    def each_layer(self) -> list[float]:
        """Predict the bytes that each layer adds to the first rank."""
        return [self.holding([[work]], 0).of_layers for work in self.parts]

    def holding(self, stages: Sequence[Works], position: int) -> Memory:
        """Return the memory of the rank at a pipeline position. The rank holds its parts of the given stages."""
        layout, allocation = self.layout, self.allocation
        own = [work for stage in stages for work in stage]
        counted = [parameters_of(stage) for stage in stages]
        parameters, trained = (sum(some) for some in zip(*counted, strict=True))
        gathered = self._gathered(parameters, trained) if layout.shards > 1 else 0.0
        of_experts, trained_experts = stored_besides(own, layout)
        of_state, trained_state = parameters + of_experts, trained + trained_experts
        weights = allocation.number * of_state / layout.of_states
        gradients = 0.0 if self.states is None else allocation.number * trained_state / layout.shards
        states = 0.0 if self.states is None else self.states * allocation.number * trained_state / layout.of_states
        gathered_cast = layout.shards > 1 and allocation.gathered < allocation.number  # already in the compute dtype
        cast = 0.0 if gathered_cast else sum(work.cast for work in own)
        kept, recomputed = self._activations(own)
        if layout.pipelined:
            kept *= in_flight(layout.schedule, layout.pp, layout.chunks, layout.per_rank, position)
        tensors = weights, gradients, states, gathered, cast, kept, recomputed
        freed = max(0.0, self._exchanged(parameters, trained) - gathered)
        return Memory(*tensors, allocation.process, freed + allocation.heap * (sum(tensors) + freed))

    def _gathered(self, parameters: float, trained: float) -> float:
        """Return the bytes of the sharded parameters and gradients that are whole during a step."""
        layout, allocation = self.layout, self.allocation
        # A layer at a time: one layer computes and the next is fetched. The layer's gradients are also in a buffer to
        # be reduced.
        two = 2 * self.largest
        reduced_once = layout.pipelined or (not layout.resharded and layout.chunks > 1)
        weights = allocation.gathered * (min(parameters, two) if layout.resharded else parameters)
        return weights + (allocation.number * trained if reduced_once else allocation.gathered * min(trained, two))

    def _exchanged(self, parameters: float, trained: float) -> float:
        """Return the bytes of exchanged tensors that the allocator keeps."""
        layout, (replicas, layerwise, stepwise) = self.layout, self.allocation.copies
        if layout.dp == 1:
            return 0.0
        if layout.shards == 1:
            return self.allocation.number * trained * replicas
        return self.allocation.number * parameters * (layerwise if layout.resharded else stepwise)

    def _activations(self, own: Works) -> tuple[float, float]:
        """Return the bytes kept for a micro-batch's backward, and the bytes of the layer that is being recomputed."""
        layout, kept, recomputed = self.layout, 0.0, 0.0
        for work in own:
            of_backward = layout.samples * (work.kept + self.allocation.activation * work.gathered)
            if layout.recompute == "full" and work is not self.parts[-1]:  # the last one has the loss
                kept += layout.samples * work.output
                recomputed = max(recomputed, of_backward)
            else:
                kept += of_backward
        return kept, recomputed


def check_gpus(plan: Plan, ranks: Sequence[Memory], memory: Callable[[int], int]) -> None:
    """Check that the GPUs, to which ranks are assigned in turn, have the memory that the ranks certainly need.

    Args:
        plan: The plan of a run that is started here.
        ranks: The memory of each rank.
        memory: A function that returns the bytes of the GPU with a given index.

    Raises:
        PlanError: If a GPU has too little memory.
    """
    assert plan.gpus is not None
    for gpu in range(min(plan.gpus, plan.processes)):
        sharing = range(gpu, plan.processes, plan.gpus)
        needed = sum(ranks[rank].state for rank in sharing)
        if needed > memory(gpu):
            who = f"rank {gpu} needs" if len(sharing) == 1 else f"ranks {', '.join(map(str, sharing))} together need"
            what = "weights, gradients and optimizer state" if ranks[gpu].gradients else "weights"
            raise PlanError(
                f"{who} {needed / 2**30:.1f} GiB of cuda:{gpu} for {what} alone, and it has "
                f"{memory(gpu) / 2**30:.1f} GiB; choose a smaller model, or fewer replicas (parallel.dp), or "
                "device=cpu"
            )
