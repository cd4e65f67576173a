"""The seconds of a whole step in a layout, by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import gcd

from parallel.actions import UNMEASURED, StageSeconds
from parallel.schedules import borders
from planner.costs import Costs
from planner.layout import PlannedLayout, cut
from planner.simulation import duration
from planner.work import LayerWork, Works, collectives_of, parameters_of, shares, stored_besides, trained_experts


@dataclass(frozen=True)
class Seconds:
    """The parts of a step on its slowest rank, in seconds. Only communication that no computation hides counts.

    Attributes:
        compute: Forward, backward and recomputation.
        bubble: Waiting for other stages.
        tensor: Collectives of tensor parallelism, and of the user's own axes.
        context: Collectives of context parallelism within layers.
        experts: Collectives of expert parallelism within layers.
        stages: Messages between stages.
        gradients: The reduction of gradients over replicas and, for tied parameters, between stages.
        shards: The gathering of sharded parameters and the scattering of their gradients.
        optimizer: The update, and all time that no other part accounts for.
    """

    compute: float
    bubble: float
    tensor: float
    context: float
    experts: float
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
    m, stages, parts = layout.chunks, stage_seconds(layers, layout, costs), shares(layers, layout)
    each = [sum(stage.forward + stage.backward for stage in stages[r :: layout.pp]) for r in range(layout.pp)]
    slowest = max(range(layout.pp), key=each.__getitem__)
    own = cut(parts, layout)[slowest :: layout.pp]
    held = [work for stage in own for work in stage]
    parameters, trained = (sum(some) for some in zip(*map(parameters_of, own), strict=True))
    stored = trained + stored_besides(held, layout)[1]
    whole_layers = [work for stage in cut(layers, layout)[slowest :: layout.pp] for work in stage]
    number, within = Counter(map(id, whole_layers)), dict[str, float]()
    for work in {id(work): work for work in whole_layers}.values():
        for name, *both in _collectives(work, layout, costs):
            within[name] = within.get(name, 0.0) + number[id(work)] * sum(both)
    passed = sum(borders(layout.pp * layout.per_rank)[slowest :: layout.pp]) * _message(layers, parts, layout, costs)
    compute = each[slowest] - sum(within.values()) - passed
    gradients, shards = _replicas(held, parameters, trained, compute, layout, costs)
    whole = duration(stages, layout.pp, m, layout.schedule) if layout.pp > 1 else m * each[slowest]
    if layout.pp > 1 and layout.resharded:  # stages wait for the gathering in turn, as for computation
        shards *= whole / (m * each[slowest])
    if layout.pp > 1:  # what the first and the last stage share
        tied = sum(work.tied_trained for work in parts)
        gradients += costs.reduce(layout.gradient * tied, 2, 2 if layout.processes <= costs.devices else 1)
    for name in (name for name, axis in layout.divided_along if axis.divides_batch):  # summed after the last backward
        gradients += costs.reduce(layout.gradient * stored / layout.shards, *_along(name, layout, costs))
    part = slowed(stages, whole, layout, costs)
    reduced = layout.per_rank if layout.shards == 1 else 1  # DDP reduces each stage's gradients separately
    # The first micro-batch passes through all stages in turn.
    first, ours = (sum(costs.begin(work, layout.samples) for work in some) for some in (parts, held))
    return Seconds(
        compute=part * (m * compute + ours),
        bubble=part * max(0.0, whole - m * each[slowest] + first - ours),  # measured parts may be off
        context=m * within.pop("context", 0.0),
        experts=m * within.pop("experts", 0.0),
        tensor=m * sum(within.values()),
        stages=m * passed,
        gradients=gradients,
        shards=shards,
        optimizer=costs.optimizer(stored / layout.of_states) + costs.fixed(layout.dp, reduced),
    )


def slowed(stages: Sequence[StageSeconds], whole: float, layout: PlannedLayout, costs: Costs) -> float:
    """Return the slowdown of computation in a step of ``whole`` seconds, in which ranks also wait for each other."""
    work = layout.dp * layout.chunks * sum(stage.forward + stage.backward for stage in stages)
    return costs.slowed(work / whole, layout.samples)


def stage_seconds(layers: Works, layout: PlannedLayout, costs: Costs) -> list[StageSeconds]:
    """Return the seconds of each stage per micro-batch, including the messages for which ranks wait."""
    seconds, of_rank = [], shares(layers, layout)
    message = _message(layers, of_rank, layout, costs)
    alike = {id(work): (work, part) for work, part in zip(layers, of_rank, strict=True)}
    parts = {  # equal layers may be one object: a search predicts thousands of layouts
        key: (
            costs.forward(part, layout.samples),
            _computed(part, layout, costs, work is not layers[-1]),
            sum(ahead for _, ahead, _ in _collectives(work, layout, costs)),
            sum(behind for *_, behind in _collectives(work, layout, costs)),
        )
        for key, (work, part) in alike.items()
    }
    for stage, beside in zip(cut(layers, layout), borders(layout.pp * layout.per_rank), strict=True):
        forward, both, *sent = (sum(parts[id(work)][i] for work in stage) for i in range(4))  # a stage can be empty
        passed = beside / 2 * message  # the sender has half of a message, the receiver the other half
        ahead = forward + sent[0] + passed
        behind = both + sum(sent) + 2 * passed - ahead
        seconds.append(StageSeconds(ahead, behind, behind / 2, behind / 2 * (UNMEASURED.weights / UNMEASURED.inputs)))
    return seconds


def seconds_of_layer(work: LayerWork, layout: PlannedLayout, costs: Costs) -> float:
    """Predict the seconds of a layer's forward and backward per micro-batch."""
    (part,) = shares([work], layout)
    return _computed(part, layout, costs, True) + sum(sum(both) for _, *both in _collectives(work, layout, costs))


def _computed(part: LayerWork, layout: PlannedLayout, costs: Costs, again: bool) -> float:
    """Return the seconds of a rank's part of a layer per micro-batch.

    ``again`` is false for the last layer, because the loss is not recomputed.
    """
    forward, backward = costs.forward(part, layout.samples), costs.backward(part, layout.samples)
    more = {"none": 0.0, "full": forward, "selective": costs.attention(part, layout.samples)}
    return forward + backward + again * more[layout.recompute]


def _collectives(work: LayerWork, layout: PlannedLayout, costs: Costs) -> Iterator[tuple[str, float, float]]:
    """Yield the axis of each of a layer's collectives, and its seconds in the forward and in the backward.

    The backward includes a recomputation.
    """
    for name, (kind, times, numbers, backward) in collectives_of(work, layout):
        each = costs.collective(kind, costs.itemsize * numbers * layout.samples, *_along(name, layout, costs))
        yield name, times * each, (backward + times * (layout.recompute == "full")) * each


def _along(name: str, layout: PlannedLayout, costs: Costs) -> tuple[int, int]:
    """Return the number of ranks along an axis of a stage, and how many of them are on the same node."""
    ranks = layout.sizes[name]
    # If these ranks do not divide a node, some of them are on two nodes.
    return ranks, ranks if layout.processes <= costs.devices else gcd(ranks, costs.devices)


def _message(layers: Works, parts: Works, layout: PlannedLayout, costs: Costs) -> float:
    """Return the seconds of one message of a micro-batch between two stages."""
    if layout.pp == 1:
        return 0.0
    # The distance to the next stage's rank.
    apart = layout.ranks_per_stage * (layout.dp if layout.order == "pp_dp" else 1)
    sent = [work.output / layout.ranks_per_stage for work in layers] if layout.scatters else [
        work.output for work in parts
    ]  # fmt: skip
    size = max(sent[:-1]) * layout.samples
    return costs.message(size, layout.pp * apart <= costs.devices, layout.schedule)


def _replicas(
    held: Works, parameters: float, trained: float, compute: float, layout: PlannedLayout, costs: Costs
) -> tuple[float, float]:
    """Return the seconds for gradients and for sharded parameters that a micro-batch's ``compute`` does not hide."""
    if layout.dp == 1:
        return 0.0, 0.0
    per_node = max(1, costs.devices // (layout.ranks_per_stage * (1 if layout.order == "pp_dp" else layout.pp)))
    if layout.shards == 1:
        # The first half of an all-reduce scatters gradients. With ZeRO-1, the second half gathers weights instead.
        size = (layout.gradient + costs.gathered) / 2 if layout.zero1 else layout.gradient
        experts, copies = trained_experts(held) if layout.ep > 1 else 0.0, layout.dp // layout.ep
        reduced = costs.reduce(size * (trained - experts), layout.dp, min(layout.dp, per_node))
        hidden = costs.hides[0] * min(reduced, compute * 2 / 3) if layout.overlaps else 0.0
        after = costs.reduce(size * experts, copies, max(1, per_node // layout.ep)) if experts else 0.0
        return reduced - hidden + after, 0.0
    size = costs.gathered * parameters
    whole = costs.gather(size, layout.shards, min(layout.shards, per_node), held)
    groups = layout.dp // layout.shards
    outer = costs.reduce(costs.gathered * trained / layout.shards, groups, max(1, per_node // layout.shards))
    times = 3 if layout.resharded else 2 / layout.chunks  # including the gradients
    each = times * whole + outer / layout.chunks + (0.0 if layout.resharded else costs.hooks(held))
    hidden = costs.hides[1] * min(each, compute)
    return 0.0, layout.chunks * (each - hidden + times * costs.copy(size))
