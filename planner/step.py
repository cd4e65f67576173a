"""The seconds of a whole step in a layout, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import gcd

from parallel.orders import UNMEASURED, StageSeconds
from parallel.schedules import borders
from planner.costs import Costs
from planner.layout import PlannedLayout, cut
from planner.simulation import duration
from planner.work import LayerWork, Works, parameters_of


@dataclass(frozen=True)
class Seconds:
    """The parts of a step on its slowest rank. Communication counts as far as no computation hides it.

    Attributes:
        compute: Forward, backward and recomputation.
        bubble: Waiting for other stages.
        tensor: Collectives of tensor parallelism.
        stages: Messages between stages.
        gradients: Their reduction over replicas and, of tied parameters, between stages.
        shards: Gathering shared parameters and scattering their gradients.
        optimizer: The update, and what no other part accounts for.
    """

    compute: float
    bubble: float
    tensor: float
    stages: float
    gradients: float
    shards: float
    optimizer: float

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return sum(getattr(self, part.name) for part in fields(self))


def seconds_of(layers: Works, layout: PlannedLayout, costs: Costs) -> Seconds:
    """Predict the seconds of a step."""
    m, stages = layout.chunks, stage_seconds(layers, layout, costs)
    each = [sum(stage.forward + stage.backward for stage in stages[r :: layout.pp]) for r in range(layout.pp)]
    slowest = max(range(layout.pp), key=each.__getitem__)
    own = cut(layers, layout)[slowest :: layout.pp]
    held = [work for stage in own for work in stage]
    parameters, trained = (sum(some) / layout.tp for some in zip(*map(parameters_of, own), strict=True))
    tensor = sum(_tensor(work, layout, costs) for work in held)
    passed = sum(borders(layout.pp * layout.per_rank)[slowest :: layout.pp]) * _message(layers, layout, costs)
    compute = each[slowest] - tensor - passed
    gradients, shards = _replicas(held, parameters, trained, compute, layout, costs)
    whole = duration(stages, layout.pp, m, layout.schedule) if layout.pp > 1 else m * each[slowest]
    if layout.pp > 1 and layout.resharded:  # stages wait for it in turn, as they do for computing
        shards *= whole / (m * each[slowest])
    if layout.pp > 1:  # what the first and the last stage share
        tied = sum(work.tied_trained for work in layers)
        gradients += costs.reduce(layout.gradient * tied / layout.tp, 2, 2 if layout.processes <= costs.devices else 1)
    part = slowed(stages, whole, layout, costs)
    reduced = layout.per_rank if layout.shards == 1 else 1  # DDP reduces each stage's gradients apart
    # The first micro-batch passes through all stages in turn.
    first, ours = (sum(costs.begin(work, layout.samples) for work in some) for some in (layers, held))
    return Seconds(
        compute=part * (m * compute + ours),
        bubble=part * max(0.0, whole - m * each[slowest] + first - ours),  # measured parts may be off
        tensor=m * tensor,
        stages=m * passed,
        gradients=gradients,
        shards=shards,
        optimizer=costs.optimizer(trained / layout.of_states) + costs.fixed(layout.dp, reduced),
    )


def slowed(stages: Sequence[StageSeconds], whole: float, layout: PlannedLayout, costs: Costs) -> float:
    """Return the slowdown of computing in a step of ``whole`` seconds, in which ranks also wait for each other."""
    work = layout.dp * layout.chunks * sum(stage.forward + stage.backward for stage in stages)
    return costs.slowed(work / whole, layout.samples)


def stage_seconds(layers: Works, layout: PlannedLayout, costs: Costs) -> list[StageSeconds]:
    """Return the seconds of each stage per micro-batch, including messages, for which ranks wait."""
    seconds, message = [], _message(layers, layout, costs)
    parts = {  # layers that are alike may be one object: a search predicts thousands of layouts
        key: (
            costs.forward(work, layout.samples, layout.tp, layout.sequence),
            _computed(work, layout, costs, work is not layers[-1]),
            _tensor(work, layout, costs),
        )
        for key, work in {id(work): work for work in layers}.items()
    }
    for stage, beside in zip(cut(layers, layout), borders(layout.pp * layout.per_rank), strict=True):
        forward, both, tensor = (sum(parts[id(work)][part] for work in stage) for part in range(3))
        passed = beside / 2 * message  # half of a message is its sender's, half its receiver's
        ahead = forward + tensor / (3 if layout.recompute == "full" else 2) + passed
        behind = both + tensor + 2 * passed - ahead
        seconds.append(StageSeconds(ahead, behind, behind / 2, behind / 2 * (UNMEASURED.weights / UNMEASURED.inputs)))
    return seconds


def seconds_of_layer(work: LayerWork, layout: PlannedLayout, costs: Costs) -> float:
    """Predict the seconds of a layer's forward and backward per micro-batch."""
    return _computed(work, layout, costs, True) + _tensor(work, layout, costs)


def _computed(work: LayerWork, layout: PlannedLayout, costs: Costs, again: bool) -> float:
    """Seconds of a layer per micro-batch. ``again`` is false for the last layer, whose loss is not recomputed."""
    forward, backward = (of(work, layout.samples, layout.tp, layout.sequence) for of in (costs.forward, costs.backward))
    more = {"none": 0.0, "full": forward, "selective": costs.attention(work, layout.samples, layout.tp)}
    return forward + backward + again * more[layout.recompute]


def _tensor(work: LayerWork, layout: PlannedLayout, costs: Costs) -> float:
    """Seconds of two all-reduces in a block's forward, two in its backward, and two if the forward is recomputed."""
    times = (6 if layout.recompute == "full" else 4) if work.attention else 0
    # Where ranks that share layers do not divide a node, some of them are on two nodes.
    together = layout.tp if layout.processes <= costs.devices else gcd(layout.tp, costs.devices)
    return times * costs.reduce(costs.itemsize * work.hidden * layout.samples, layout.tp, together)


def _message(layers: Works, layout: PlannedLayout, costs: Costs) -> float:
    """Seconds of one message of a micro-batch between two stages."""
    if layout.pp == 1:
        return 0.0
    apart = layout.tp * (layout.dp if layout.order == "pp_dp" else 1)  # how far the next stage's rank is
    parts = layout.tp if layout.sequence or layout.scatters else 1
    size = max(work.output for work in layers[:-1]) * layout.samples / parts
    return costs.message(size, layout.pp * apart <= costs.devices, layout.schedule)


def _replicas(
    held: Works, parameters: float, trained: float, compute: float, layout: PlannedLayout, costs: Costs
) -> tuple[float, float]:
    """Seconds for gradients and for shared parameters that ``compute``, of a micro-batch, does not hide."""
    if layout.dp == 1:
        return 0.0, 0.0
    per_node = max(1, costs.devices // (layout.tp * (1 if layout.order == "pp_dp" else layout.pp)))
    if layout.shards == 1:
        # The first half of an all-reduce scatters gradients. With ZeRO-1, the second half gathers weights.
        size = (layout.gradient + costs.gathered) / 2 if layout.zero1 else layout.gradient
        reduced = costs.reduce(size * trained, layout.dp, min(layout.dp, per_node))
        hidden = costs.hides[0] * min(reduced, compute * 2 / 3) if layout.overlaps else 0.0
        return reduced - hidden, 0.0
    size = costs.gathered * parameters
    whole = costs.gather(size, layout.shards, min(layout.shards, per_node), held)
    groups = layout.dp // layout.shards
    outer = costs.reduce(costs.gathered * trained / layout.shards, groups, max(1, per_node // layout.shards))
    times = 3 if layout.resharded else 2 / layout.chunks  # with the gradients
    each = times * whole + outer / layout.chunks + (0.0 if layout.resharded else costs.hooks(held))
    hidden = costs.hides[1] * min(each, compute)
    return 0.0, layout.chunks * (each - hidden + times * costs.copy(size))
