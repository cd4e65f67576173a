"""The measured seconds of each layer, and the partition that equalizes the costs of stages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, permutations

import torch
from torch import Tensor

from data.dataset import Batch
from models.chain import Chain, LayerSpec, as_tuple
from parallel.devices import (
    autocast,
    between_layers,
    local_device,
    outside_autocast,
    parameter_dtype,
    share_cores,
    synchronize,
)
from parallel.partition import block_partition, blocks, even_split
from parallel.plan import Plan
from parallel.stage import Stage
from parallel.zero_bubble.order import expected_makespan

ROUNDS = 5
_MOST_MICROBATCHES = 32
# A partition whose gain over the uniform partition is below this is measurement noise.
_LEAST_GAIN = 0.03
# Simulating this many pieces of work (stages x micro-batches, over all splits tried) takes a second or two.
_MOST_PIECES = 50_000

Times = list[tuple[float, float]]  # seconds of forward and backward, by micro-batch
Cost = Callable[[Sequence[int]], float]  # the cost of a step, given the number of layers of each stage


def seconds_per_layer(plan: Plan, chain: Chain, sample: Batch, seed: int, threads: int | None) -> list[float]:
    """Measure the seconds of forward plus backward of each layer on one micro-batch. The last layer includes the loss.

    The result is the fastest of several rounds. Each round runs the whole chain, so a temporary slowdown of the machine
    affects all layers alike. Layers are built one at a time, each as a stage, on the run's device and with as many
    threads as a rank will have.
    """
    device = local_device(plan.device_type, 0)
    share_cores(plan.processes, threads)
    rounds = [time_layers(plan.precision, chain, sample.to(device), seed) for _ in range(ROUNDS)]
    return [min(sum(seconds[1]) for seconds in layer) for layer in zip(*rounds, strict=True)]


def time_layers(
    precision: str,
    chain: Chain,
    sample: Batch,
    seed: int,
    least_s: float = 0.0,
    wait: Callable[[], None] = lambda: None,
) -> list[Times]:
    """Return the seconds of forward and backward of each micro-batch, at least two, for each layer.

    The first micro-batch also casts the weights and allocates their gradients. Layers with the same builder and the
    same input shapes are measured once. No random state outside the layers is changed.

    Args:
        precision: The precision of the plan.
        chain: The model.
        sample: A micro-batch on the device that computes.
        seed: The seed for weights and dropout.
        least_s: The seconds for which each layer is repeated, up to 32 micro-batches.
        wait: A function that is called before a layer's first micro-batch, to start at the same time as other
            processes.
    """
    dtype = parameter_dtype(precision)
    tensors = tuple(x.to(dtype) if x.is_floating_point() else x for x in sample.input_tensors)

    def timed(layer: LayerSpec, tensors: tuple[Tensor, ...]) -> tuple[Times, tuple[Tensor, ...]]:
        device, passed = sample.target_tensors[0].device, between_layers(precision)
        stage = Stage(chain, [layer.name], seed=seed, device=device, dtype=dtype, between_layers=passed)
        with autocast(precision, stage.device.type):
            _time_stage(stage, tensors, sample, 1)  # kernels are chosen and memory is taken
        stage.zero_grad()
        wait()
        with autocast(precision, stage.device.type):
            return _time_stage(stage, tensors, sample, 2, least_s)

    with torch.random.fork_rng(devices=[]):
        return list(chain.walk(tensors, timed))


def _time_stage(
    stage: Stage, tensors: tuple[Tensor, ...], sample: Batch, fewest: int, least_s: float = 0.0
) -> tuple[Times, tuple[Tensor, ...]]:
    """Return the seconds of each micro-batch, and the stage's output."""
    device, count, times, begun = stage.device, len(sample), [], time.perf_counter()
    stage.begin(training=True, step=1, loss_scale=1 / sample.terms)
    while len(times) < fewest or (len(times) < _MOST_MICROBATCHES and time.perf_counter() - begun < least_s):
        received = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        synchronize(device)
        start = time.perf_counter()
        samples = len(times) * count, count
        output = as_tuple(stage(*received, samples=samples, targets=sample.targets, weights=sample.weights))
        differentiable = [x for x in output if x.requires_grad]
        synchronize(device)
        middle = time.perf_counter()
        with outside_autocast(device.type):
            torch.autograd.backward(differentiable, [torch.ones_like(x) for x in differentiable])
        synchronize(device)
        times.append((middle - start, time.perf_counter() - middle))
    stage.end()
    return times, tuple(x.detach().requires_grad_(x.requires_grad) for x in output)


def equal_stages(
    costs: Sequence[float], stages: int, ranks: int | None = None, chunks: int = 1, schedule: str | None = None
) -> list[int]:
    """Find the numbers of layers per stage that minimize the cost of a step.

    If the uniform partition is nearly as good as the best one, the uniform partition is returned. If there are too many
    partitions to try, the search moves layers between pairs of stages. Stage i runs on rank i % ``ranks``, or on rank i
    if ``ranks`` is None. The schedule "planned" is judged by its simulated makespan.
    """
    ranks = ranks or stages

    def cost(counts: Sequence[int]) -> float:
        each = stage_costs(costs, counts)
        # At best the slowest rank never waits after the other ranks' stages have filled the pipeline.
        return chunks * max(sum(each[rank::ranks]) for rank in range(ranks)) + (ranks - 1) * max(each)

    def simulated(counts: Sequence[int]) -> float:
        return expected_makespan(stage_costs(costs, counts), ranks, chunks)

    uniform, best = even_split(len(costs), stages), block_partition(costs, stages)
    if stages > ranks:
        best = _cheapest(cost, best, chunks)
    if schedule == "planned":
        cost, best = simulated, _cheapest(simulated, best, chunks)
    return best if cost(best) < (1 - _LEAST_GAIN) * cost(uniform) else uniform


def _cheapest(cost: Cost, counts: list[int], chunks: int) -> list[int]:
    """Return the cheapest split. If there are too many splits, return the best one reached by moves from ``counts``."""
    layers, stages = sum(counts), len(counts)
    if math.comb(layers - 1, stages - 1) * stages * chunks <= _MOST_PIECES:
        cuts = combinations(range(1, layers), stages - 1)
        return min(([end - start for start, end in pairwise((0, *cut, layers))] for cut in cuts), key=cost)
    while True:
        better = min(_moves(counts), key=cost, default=counts)
        if cost(better) >= cost(counts):
            return counts
        counts = better


def _moves(counts: Sequence[int]) -> Iterator[list[int]]:
    """Yield every split that moves some layers from one stage to another."""
    for giver, taker in permutations(range(len(counts)), 2):
        for moved in range(1, counts[giver]):
            yield [n - moved * (i == giver) + moved * (i == taker) for i, n in enumerate(counts)]


def stage_costs(costs: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Add up the costs of each stage's layers."""
    return [sum(block) for block in blocks(costs, counts)]


def stage_shares(costs: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return each stage's fraction of the total cost, from 0 to 1. See ``stage_costs`` for the arguments."""
    return [cost / sum(costs) for cost in stage_costs(costs, counts)]
