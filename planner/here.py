"""Measurements of the parts of a step on this machine, in processes that compute at the same time, as in a run.

Layers are measured one at a time. The costs of a strategy are measured with a small model of elementwise products,
which takes almost no time to compute. Every result is the slowest rank's.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.machine import usable_cores
from data.dataset import Batch
from launchers import World, call_in_workers
from launchers.meeting import rendezvous
from models.chain import Chain, LayerSpec
from models.losses import SquaredError
from models.module_pickling import dumps
from parallel.devices import keep_freed_memory, local_device, peak_memory_bytes, share_cores, synchronize
from parallel.examination import examine
from parallel.host_group import init_process_group
from parallel.layout import Layout
from parallel.planning import make_plan
from parallel.schedules import borders
from parallel.strategy import Options, Strategy, build_strategy
from planner.balance import time_layers

_NUMBERS = 2**8, 2**19  # elements per layer of the small model, and elements per message between its stages
_TENSORS = 8  # tensors that hold the few numbers of a layer, to measure the cost per tensor
_LAYERS = 4  # of the small model, or two for each rank
# For a pipeline: the stages per rank, and whether there are at least as many micro-batches as stages.
_SCHEDULES = {"gpipe": (1, False), "1f1b": (1, True), "interleaved_1f1b": (2, False)}
_MORE = 3  # micro-batches of the small model besides the first one
_ROUNDS, _PASS_S = 3, 2.0  # rounds of the layers, unless one is slow; seconds of the model with the largest micro-batch
_SIZES = 5  # number of micro-batch sizes
_STEPS_S, _FEWEST_STEPS, _MOST_STEPS = 0.2, 5, 60  # for the small model
_LEAST_S = 0.02  # for a layer: processes that share a core take turns of some milliseconds


@dataclass(frozen=True)
class Line:
    """Seconds as a linear function of a size (samples, bytes or parameters), plus ``piece`` seconds per tensor."""

    fixed: float = 0.0
    each: float = 0.0
    piece: float = 0.0

    def __call__(self, size: float) -> float:
        """Return the seconds for a size."""
        return self.fixed + self.each * size

    @classmethod
    def through(cls, sizes: Sequence[float], seconds: Sequence[float]) -> Line:
        """Return the line through two ascending sizes; neither coefficient is below 0."""
        (low, high), (first, second) = sizes, (max(0.0, min(seconds)), max(0.0, seconds[1]))
        each = (second - first) / (high - low)
        return cls(first - each * low, each) if first >= each * low else cls(0.0, second / high)


@dataclass(frozen=True)
class Curve:
    """Seconds measured at ascending sizes: linear interpolation between them, proportional growth beyond."""

    sizes: Sequence[float]
    seconds: Sequence[float]

    def __call__(self, size: float) -> float:
        """Return the seconds for a size."""
        return float(np.interp(size, self.sizes, self.seconds)) * max(1.0, size / self.sizes[-1])


@dataclass(frozen=True)
class LayerSeconds:
    """A layer's seconds per micro-batch, as functions of the number of samples.

    Attributes:
        name: The name of the layer.
        forward: Seconds of the forward, while as many ranks compute as there are cores.
        backward: Seconds of the backward, likewise.
        first: Seconds of forward and backward of a step's first micro-batch.
        alone: Seconds of forward and backward while the other ranks wait.
    """

    name: str
    forward: Curve
    backward: Curve
    first: Curve
    alone: Curve


@dataclass(frozen=True)
class Here:
    """The measurements with one number of processes.

    Attributes:
        processes: The number of processes.
        at_once: The number of processes that can compute at the same time.
        layers: The measurements of the chain's layers, in order.
        step: Seconds per step that no other part accounts for, without replicas.
        overhead: Extra seconds per micro-batch when a layer is timed in isolation.
        update: Seconds of clipping and the optimizer, by the number of parameters.
        process: Bytes of a process with its data and a model of negligible size.
        replicas: Seconds that ddp adds to a step, by the bytes of the gradients.
        shards: Seconds that fsdp adds per layer and micro-batch, by the bytes of the parameters.
        hooks: Seconds that fsdp adds per layer and micro-batch if parameters stay whole for a step; independent of
            size.
        messages: Seconds of a message to the next stage, by schedule and by bytes. The entry interleaved_1f1b is used
            for all schedules with several stages per rank.
    """

    processes: int
    at_once: int
    layers: Sequence[LayerSeconds]
    step: float
    update: Line
    overhead: float = 0.0
    process: int = 0
    replicas: Line = Line()
    shards: Line = Line()
    hooks: Line = Line()
    messages: Mapping[str, Line] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """The model and the configuration to measure.

    Attributes:
        parallel: The section ``parallel`` of the configuration.
        device: cpu, cuda or mps.
        precision: The precision; not auto.
        chain: The model.
        sample: A batch of samples.
        optimizer: Creates an optimizer, with methods ``train()`` and ``step(lr)``, for a strategy.
        build: A function that sets up a process as the run would, and returns the objects besides the model, such as
            the data.
        seed: The seed for weights and dropout.
    """

    parallel: Any
    device: str
    precision: str
    chain: Chain
    sample: Batch
    optimizer: Callable[[Strategy], Any]
    build: Callable[[World], Any]
    seed: int = 0


def measure(subject: Subject, processes: int, least: int, most: int) -> Here:
    """Measure in new processes. This process does not change.

    Args:
        subject: The model and the configuration to measure.
        processes: The number of processes.
        least: The number of samples of the smallest micro-batch that the model accepts.
        most: The number of samples of the largest micro-batch to measure. It is reduced for slow models.
    """
    args = dumps(subject), (least, most)
    here, *_ = call_in_workers(_work, args, processes, timeout_s=subject.parallel.timeout_s)
    return here


def free_memory(timeout_s: float) -> float:
    """Return the free bytes of the first GPU. A new process reads them, because a CUDA context takes about 0.5 GiB."""
    (free,) = call_in_workers(_ask_free_memory, (), 1, timeout_s=timeout_s)
    return free


def _ask_free_memory(_: World) -> float:
    return torch.cuda.mem_get_info(0)[0]


def _work(world: World, packed: bytes, limits: tuple[int, int]) -> Here:
    """Measure on one of the ranks. All ranks return the same result."""
    subject: Subject = pickle.loads(packed)
    timeout_s = subject.parallel.timeout_s
    share_cores(world.local_size, subject.parallel.threads)
    if subject.device == "cpu":
        keep_freed_memory()
    with rendezvous(world, timeout_s) as world:
        if world.meeting is not None:
            store = world.meeting.store
            init_process_group(subject.device, world.rank, world.size, world.local_rank, store, timeout_s)
        at_once = world.size if subject.device == "cuda" else min(world.size, max(1, usable_cores()))
        some = dist.new_group(range(at_once)) if 1 < at_once < world.size else None
        among = some if isinstance(some, dist.ProcessGroup) else None
        ranks = _Ranks(world.rank, world.size, at_once, local_device(subject.device, world.local_rank), among)
        held = subject.build(world)
        for name in ("single", "ddp", "fsdp") if world.size > 1 else ("single",):
            _step(ranks, subject, name, _NUMBERS[0], 1)  # imports the modules that the strategy needs
        process = peak_memory_bytes(ranks.device)
        del held
        layers = _layers(ranks, subject, *limits)
        here = Here(world.size, at_once, layers, process=process, **_strategies(ranks, subject))
        ranks.wait()
        if world.meeting is not None:
            dist.destroy_process_group()
        return here


@dataclass(frozen=True)
class _Ranks:
    """The processes that measure together, seen from one process."""

    rank: int
    size: int
    at_once: int
    device: torch.device
    some: dist.ProcessGroup | None  # on the first ``at_once`` ranks: their group, if they are not all ranks

    def wait(self, group: dist.ProcessGroup | None = None) -> None:
        """Wait for the other ranks."""
        if self.size > 1:
            dist.barrier(group)

    def slowest(self, seconds: Sequence | Tensor) -> Tensor:
        """Return the slowest rank's seconds, as the lower quartile over rounds, because some rounds are disturbed."""
        worst = torch.as_tensor(seconds, dtype=torch.float64)
        if self.size > 1:
            worst = worst.to(self.device)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.quantile(0.25, dim=0).cpu()


def _layers(ranks: _Ranks, subject: Subject, least: int, most: int) -> list[LayerSeconds]:
    """Measure the layers at several sizes: on as many ranks at once as there are cores, then on rank 0 alone."""

    def timed(samples: int, wait: Callable[[], None]) -> list[list[float]]:
        some, parts = torch.arange(samples) % len(subject.sample), []
        batch = subject.sample.map(lambda tensor: tensor[some]).to(ranks.device)
        for first, *others in time_layers(subject.precision, subject.chain, batch, subject.seed, _LEAST_S, wait):
            forward, backward = (median(part) for part in zip(*others, strict=True))
            parts.append([forward, backward, sum(first), forward + backward])
        return parts

    def rounds(among: int, sizes: Sequence[int], count: int) -> Tensor:
        """Measure on the first ranks while the other ranks wait. Returns a tensor [size, layer, part]."""
        seconds = torch.zeros(count, len(sizes), len(subject.chain.layers), 4)
        ranks.wait()
        if ranks.rank < among:
            wait = partial(ranks.wait, ranks.some) if among > 1 else lambda: None
            seconds = torch.tensor([[timed(samples, wait) for samples in sizes] for _ in range(count)])
        return ranks.slowest(seconds)

    each = float(rounds(ranks.at_once, [least], 1)[..., -1].sum()) / least  # seconds of a sample
    large = max(least + 1, min(most, int(_PASS_S / each)))
    sizes = sorted({round(size) for size in np.geomspace(least, large, _SIZES)})
    count = _ROUNDS if each * large < _PASS_S / 2 else 1
    found = rounds(ranks.at_once, sizes, count)
    if ranks.at_once > 1:
        found[..., -1] = rounds(1, sizes, count)[..., -1]
    curves = [[Curve(sizes, seconds) for seconds in layer] for layer in found.permute(1, 2, 0).tolist()]
    return [LayerSeconds(name, *of) for name, of in zip(subject.chain.names, curves, strict=True)]


def _strategies(ranks: _Ranks, subject: Subject) -> dict[str, Any]:
    """Measure, on the small model, the time that strategies add to the time of the layers."""
    few, bytes_of = _NUMBERS[0], [4 * n for n in _NUMBERS]
    chain, sample = _small(ranks, few)
    layers, step = len(chain.layers), partial(_step, ranks, subject)  # which returns (step, update)

    def each(name: str, numbers: int, least: int = 1, **more: Any) -> tuple[Tensor, float]:
        """Return (step, update) with the fewest micro-batches, and the seconds of each additional micro-batch."""
        low, high = (step(name, numbers, chunks, **more) for chunks in (least, least + _MORE))
        return low, float(high[0] - low[0]) / _MORE

    def shared(**more: Any) -> tuple[float, float]:
        """Return the seconds that fsdp adds per micro-batch to a small layer, and to each further tensor of it."""
        in_one, several = ((each("fsdp", few, tensors=n, **more)[1] - computed[0]) / layers for n in (1, _TENSORS))
        piece = max(0.0, (several - in_one) / (_TENSORS - 1))
        return max(0.0, in_one - piece), piece

    times = time_layers(subject.precision, chain, sample.to(ranks.device), subject.seed, _LEAST_S)
    one_by_one = float(ranks.slowest([sum(median(map(sum, layer[1:])) for layer in times)]))
    single, computed = zip(*(each("single", n) for n in _NUMBERS), strict=True)
    lines = {"update": Line.through([layers * n for n in _NUMBERS], [float(update) for _, update in single])}
    messages: dict[str, Line] = {}
    if ranks.size > 1:
        replicas = [float(step("ddp", n)[0] - alone) for n, (alone, _) in zip(_NUMBERS, single, strict=True)]
        lines["replicas"] = Line.through([layers * size for size in bytes_of], replicas)
        fixed, piece = shared()
        large = (each("fsdp", _NUMBERS[1])[1] - computed[1]) / layers - piece
        lines["shards"] = replace(Line.through(bytes_of, [fixed, large]), piece=piece)
        fixed, piece = shared(reshard=False)
        lines["hooks"] = Line(fixed, piece=piece)
        for schedule, (stages, filled) in _SCHEDULES.items():
            more = [each("pipelined", n, ranks.size if filled else 1, schedule=schedule)[1] for n in _NUMBERS]
            # The busiest rank counts. It has a half of each message that it sends or receives.
            sent = sum(borders(stages * ranks.size)[min(1, ranks.size - 2) :: ranks.size])
            added = [(piped - alone / ranks.size) / sent for piped, alone in zip(more, computed, strict=True)]
            messages[schedule] = Line.through(bytes_of, added)
    overhead = (one_by_one - computed[0]) / layers * ranks.at_once / ranks.size  # here all ranks computed at once
    return {"step": max(0.0, float(single[0][0]) - computed[0]), "overhead": overhead, "messages": messages, **lines}


def _small(ranks: _Ranks, numbers: int, tensors: int = 1) -> tuple[Chain, Batch]:
    """Return a sample and the small model, which has enough layers for two stages per rank."""
    layer = partial(_Scale, numbers, tensors)
    chain = Chain([LayerSpec(f"layer{i}", layer) for i in range(max(_LAYERS, 2 * ranks.size))], loss=SquaredError())
    return chain, Batch(torch.ones(1, numbers), torch.zeros(1, numbers))


def _step(
    ranks: _Ranks, subject: Subject, name: str, numbers: int, chunks: int = 1, tensors: int = 1, **keys: Any
) -> Tensor:
    """Measure a step of the small model and its update, in a layout with the given ``keys``."""
    chain, sample = _small(ranks, numbers, tensors)
    alone, size = name == "single", ranks.size
    dp, pp = (1, 1) if alone else (1, size) if name == "pipelined" else (size, 1)
    layout = Layout(name, dp, pp, chunks, **keys)
    parallel = SimpleNamespace(**{**subject.parallel, **layout.section()})
    plan = make_plan(
        parallel, chain, global_batch_size=chunks * dp, device=subject.device, precision=subject.precision,
        world_size=layout.processes,
    )  # fmt: skip
    mesh = plan.mesh(0) if alone else plan.mesh(ranks.rank).connect(parallel.timeout_s)
    plan = replace(plan, **examine(chain, sample).for_plan())
    strategy = build_strategy(plan, chain, mesh, Options(subject.seed), sample, ranks.rank)
    optimizer, batch = subject.optimizer(strategy), sample.map(lambda tensor: tensor.expand(chunks, -1))

    def timed(step: int) -> tuple[float, float]:
        start = time.perf_counter()
        norm = strategy.train_step(batch, step).grad_norm
        synchronize(ranks.device)
        middle = time.perf_counter()
        strategy.clip_grad_norm_(1.0, norm + 2.0)
        optimizer.step(1e-3)
        synchronize(ranks.device)
        return middle - start, time.perf_counter() - middle

    optimizer.train()
    ranks.wait()
    first = ranks.slowest([timed(step) for step in (1, 2)])
    count = int(min(_MOST_STEPS, max(_FEWEST_STEPS, _STEPS_S / float(first.sum()))))
    found = ranks.slowest([timed(step) for step in range(3, 3 + count)])
    strategy.close()
    mesh.disconnect()
    return found


class _Scale(nn.Module):
    """An elementwise product. The factors are spread over several tensors."""

    def __init__(self, numbers: int, tensors: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(numbers // tensors) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cat([*self.weights])
