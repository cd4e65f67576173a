"""The seconds and the bytes of a whole step in a layout, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from parallel.schedules import SCHEDULES, in_flight
from planner.cluster import Cluster
from planner.costs import Costs
from planner.work import LayerWork


@dataclass(frozen=True)
class Layout:
    """How a model is trained.

    Attributes:
        dp: The number of replicas.
        tp: Ranks that share each layer.
        pp: Ranks of a pipeline.
        chunks: Micro-batches of a replica and step.
        samples: Of a micro-batch.
        schedule: The pipeline's.
        per_rank: Stages of each rank.
        shards: Replicas that share parameters, gradients and optimizer state; 1: each has its own.
        reshard: Whether shared parameters are whole one layer at a time.
        recompute: none, full (of each layer only the input is kept) or selective (attention is computed again).
        scattered: Whether what the ranks of a layer all hold is cut in ``tp`` too (sequence parallelism).
        overlaps: Whether gradients are reduced while the last backward computes.
        tp_first: The order of ranks: layers' ranks, then replicas, then stages; or else stages before replicas.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    samples: int = 1
    schedule: str = "1f1b"
    per_rank: int = 1
    shards: int = 1
    reshard: bool = True
    recompute: str = "none"
    scattered: bool = False
    overlaps: bool = True
    tp_first: bool = True

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.dp * self.tp * self.pp


@dataclass(frozen=True)
class Seconds:
    """The parts of a step on its slowest rank; those of communication are what no computation hides."""

    compute: float
    bubble: float
    tensor: float
    stages: float
    gradients: float
    shards: float
    optimizer: float

    @property
    def total(self) -> float:
        """The step."""
        return sum(getattr(self, one.name) for one in fields(self))


def cut(works: Sequence[LayerWork], stages: int) -> list[Sequence[LayerWork]]:
    """Cut the layers into stages: the inner ones equally, the first and the last go with the first and last stage."""
    if stages == 1:
        return [works]
    inner = works[1:-1]
    each, extra = divmod(len(inner), stages)
    ends, parts, start = [each + (i < extra) for i in range(stages)], [], 0
    for count in ends:
        parts.append(list(inner[start : start + count]))
        start += count
    parts[0], parts[-1] = [works[0], *parts[0]], [*parts[-1], works[-1]]
    return parts


def seconds_of(works: Sequence[LayerWork], layout: Layout, cluster: Cluster, precision: str = "bf16") -> Seconds:
    """Predict the seconds of a step."""
    costs, one = Costs(cluster, precision), layout
    stages = cut(works, one.pp * one.per_rank)
    b, tp = one.samples, one.tp
    tp_node = min(tp, cluster.devices)

    def layer(work: LayerWork) -> tuple[float, float]:
        """Seconds of computation, forward and backward, and of tensor parallelism's collectives."""
        forward = costs.forward(work, b, tp)
        again = {"none": 0.0, "full": forward, "selective": costs.attention(work, b, tp)}[one.recompute]
        if not work.attention:  # the head, which computes its loss once
            again = 0.0
        times = 4 + 2 * (one.recompute == "full")
        tensor = times * costs.reduce(work.output * b, tp, tp_node) if work.attention else 0.0
        return 3 * forward + again, tensor

    computed = [[layer(work) for work in stage] for stage in stages]
    compute = [sum(c for c, _ in stage) for stage in computed]
    tensor = [sum(t for _, t in stage) for stage in computed]
    passed = 0.0
    if one.pp > 1:
        size = max(stage[-1].output for stage in stages[:-1]) * b / (tp if tp > 1 else 1)
        near = one.tp * (one.dp if one.tp_first else 1) * 2 <= cluster.devices
        passed = 2 * costs.message(size, near)
    ranks = range(one.pp)
    whole = [sum(compute[r :: one.pp]) + sum(tensor[r :: one.pp]) + passed * one.per_rank * (one.pp > 1) for r in ranks]
    slowest = max(ranks, key=whole.__getitem__)
    m = one.chunks
    work, idle = m * whole[slowest], (sum(whole) - whole[slowest]) / one.per_rank
    parameters = [sum(w.parameters for stage in stages[r :: one.pp] for w in stage) / tp for r in ranks]
    most = max(parameters)
    gradients, shards = _replicas(costs, one, stages[slowest :: one.pp], most, m, sum(compute[slowest :: one.pp]))
    return Seconds(
        compute=m * sum(compute[slowest :: one.pp]),
        bubble=idle if one.pp > 1 else 0.0,
        tensor=m * sum(tensor[slowest :: one.pp]),
        stages=work - m * (sum(compute[slowest :: one.pp]) + sum(tensor[slowest :: one.pp])),
        gradients=gradients,
        shards=shards,
        optimizer=costs.optimizer(most / one.shards) + cluster.step,
    )


def _replicas(
    costs: Costs, one: Layout, stages: Sequence[Sequence[LayerWork]], parameters: float, m: int, compute: float
) -> tuple[float, float]:
    """Seconds of gradients and of shared parameters that computing does not hide; ``compute`` is of a micro-batch."""
    cluster, size = costs.cluster, costs.bytes * parameters
    near = max(1, cluster.devices // (one.tp if one.tp_first else one.tp * one.pp))
    backward = 2 / 3 * compute
    if one.shards == 1:
        reduced = costs.reduce(2 * size, one.dp, min(one.dp, near)) if one.dp > 1 else 0.0  # float32
        return max(reduced - backward * one.overlaps, 0.1 * reduced), 0.0
    inner = costs.gather(size, one.shards, min(one.shards, near))
    groups = one.dp // one.shards
    outer = costs.reduce(size / one.shards, groups, 1) if groups > 1 else 0.0
    fetched = m if one.reshard else 1
    each = (2 * fetched * inner + m * inner + outer) / m
    hidden = compute
    return 0.0, m * max(each - hidden, 0.05 * each)
