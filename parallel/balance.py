"""What each layer costs, so that stages can be made equal: in seconds or in bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, pairwise, permutations

import torch

from common.machine import usable_cores
from data.batch import Batch
from models.chain import Chain, as_tuple
from parallel.devices import local_device
from parallel.order import expected_makespan
from parallel.partition import block_partition, even_split
from parallel.plan import Plan
from parallel.precision import autocast, parameter_dtype
from parallel.schedules import in_flight
from parallel.shape_inference import trace
from parallel.stage import Stage

ROUNDS = 5
# A partition that promises less than this over the uniform one is noise of the measurement.
_LEAST_GAIN = 0.03
# What all splits may have the simulated ranks do, two pieces for each stage and micro-batch: a second or two.
_MOST_PIECES = 50_000

Cost = Callable[[Sequence[int]], float]  # of a step, given how many layers each stage has


def seconds_per_layer(plan: Plan, chain: Chain, sample: Batch, seed: int, threads: int | None) -> list[float]:
    """Forward plus backward of each layer on the micro-batch ``sample``, in seconds: the fastest of some rounds.

    A round goes through the whole chain, so that a machine that is slow for a while is slow for all layers alike. One
    layer is built at a time, as a stage of its own, on the run's device with the threads that a rank will have. The
    last one's time includes the loss. No random state outside of the layers is touched.
    """
    device = local_device(plan.device_type, 0)
    sample = sample.to(device)
    state = torch.default_generator.get_state()
    try:
        with (
            _threads(threads or max(1, usable_cores() // plan.processes) if device.type == "cpu" else None),
            autocast(plan.precision, device.type),
        ):
            rounds = [_round(plan, chain, sample, seed, device) for _ in range(ROUNDS)]
    finally:
        torch.default_generator.set_state(state)
    return [min(times) for times in zip(*rounds, strict=True)]


def _round(plan: Plan, chain: Chain, sample: Batch, seed: int, device: torch.device) -> list[float]:
    """Seconds of each layer, measured once."""
    dtype = parameter_dtype(plan.precision)
    tensors = tuple(x.to(dtype) if x.is_floating_point() else x for x in sample.input_tensors)
    seconds = []
    for name in chain.names:
        stage = Stage(chain, [name], seed=seed, device=device, dtype=dtype)
        stage.begin(training=True, step=1, loss_scale=1 / sample.targets.numel())
        for index in range(2):  # the first micro-batch casts the weights and makes their gradients
            received = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
            _wait_for(device)
            start = time.perf_counter()
            output = as_tuple(
                stage(*received, microbatch=torch.tensor([index]), targets=sample.targets, weights=sample.weights)
            )
            differentiable = [x for x in output if x.requires_grad]
            torch.autograd.backward(differentiable, [torch.ones_like(x) for x in differentiable])
            _wait_for(device)
            elapsed = time.perf_counter() - start
        stage.end()
        seconds.append(elapsed)
        tensors = output
    return seconds


def bytes_per_layer(plan: Plan, chain: Chain, sample: Batch, tensors_per_parameter: int) -> list[float]:
    """Parameters with what the optimizer keeps of them, and the activations of the micro-batches in flight, in bytes.

    tensors_per_parameter  the weight, its gradient and the optimizer's state
    """
    held = 1
    if plan.pipelined:
        held = in_flight(plan.schedule, plan.pp, plan.chunks, plan.stages_per_rank, 0)
    traced = trace(chain, sample, plan.precision, plan.device_type)
    skeleton = chain.skeleton()
    size = parameter_dtype(plan.precision).itemsize * tensors_per_parameter
    return [
        size * sum(p.numel() for p in skeleton[t.name].parameters()) + held * (t.kept + t.output_bytes) + t.cast
        for t in traced
    ]


def equal_stages(
    costs: Sequence[float], stages: int, ranks: int | None = None, chunks: int = 1, schedule: str | None = None
) -> list[int]:
    """Layers of each stage so that a step of ``chunks`` micro-batches costs least; uniform where it is nearly as good.

    ranks     where fewer than ``stages``, stage i runs on rank i % ranks, and what counts most is a rank's sum
    schedule  planned: what counts is when its order ends
    returns   the best split; where ranks have several stages and splits are too many to try, the best that moving
              layers between two stages leads to
    """
    ranks = ranks or stages

    def cost(counts: Sequence[int]) -> float:
        each = stage_costs(costs, counts)
        # The dearest rank never waits at best, once the others' stages have filled the pipeline.
        return chunks * max(sum(each[rank::ranks]) for rank in range(ranks)) + (ranks - 1) * max(each)

    def planned_cost(counts: Sequence[int]) -> float:
        return expected_makespan(stage_costs(costs, counts), ranks, chunks)

    uniform = even_split(len(costs), stages)
    blocks = block_partition(costs, stages)
    if schedule == "planned":
        best = _cheapest(planned_cost, len(costs), chunks, [blocks, _cheapest(cost, len(costs), chunks, [blocks])])
        cost = planned_cost
    else:
        best = _cheapest(cost, len(costs), chunks, [blocks]) if stages > ranks else blocks
    return best if cost(best) < (1 - _LEAST_GAIN) * cost(uniform) else uniform


def _cheapest(cost: Cost, layers: int, chunks: int, starts: Sequence[list[int]]) -> list[int]:
    """The cheapest split of all; where they are too many, the cheapest that moves from ``starts`` lead to."""
    stages = len(starts[0])
    if math.comb(layers - 1, stages - 1) * stages * chunks <= _MOST_PIECES:
        return min(_splits(layers, stages), key=cost)
    return min((_descend(start, cost) for start in starts), key=cost)


def _splits(layers: int, stages: int) -> Iterator[list[int]]:
    """Every way to deal layers to stages in their order, at least one each."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield [end - start for start, end in pairwise((0, *cuts, layers))]


def _descend(counts: list[int], cost: Cost) -> list[int]:
    """The split that moves lead to from ``counts``, each the one that gains most, until none gains anything."""
    while True:
        better = min(_moves(counts), key=cost, default=counts)
        if cost(better) >= cost(counts):
            return counts
        counts = better


def _moves(counts: Sequence[int]) -> Iterator[list[int]]:
    """Every split in which one stage has some layers fewer and another as many more."""
    for giver, taker in permutations(range(len(counts)), 2):
        for moved in range(1, counts[giver]):
            yield [n - moved * (i == giver) + moved * (i == taker) for i, n in enumerate(counts)]


def stage_costs(costs: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The sum of each stage's layers."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [sum(costs[s : s + n]) for s, n in zip(starts, counts, strict=True)]


def stage_shares(costs: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Each stage's part of all costs, from 0 to 1."""
    return [cost / sum(costs) for cost in stage_costs(costs, counts)]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
