"""The seconds of a whole step in a layout, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from parallel.orders import UNMEASURED, StageSeconds
from parallel.schedules import borders
from planner.costs import Costs
from planner.layout import PlannedLayout, cut
from planner.simulation import duration
from planner.work import LayerWork, Works, parameters_of


@dataclass(frozen=True)
class Seconds:
    """The parts of a step on its slowest rank; those of communication are what no computation hides.

    Attributes:
        compute: Forwards, backwards, and what is computed again.
        bubble: Waiting for other stages.
        tensor: Collectives of tensor parallelism.
        stages: Messages between stages.
        gradients: Their reduction over replicas and, of tied parameters, between stages.
        shards: Gathering shared parameters and scattering their gradients.
        optimizer: The update, and what is in no other part.
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
        """The step."""
        return sum(getattr(self, one.name) for one in fields(self))


def seconds_of(works: Works, layout: PlannedLayout, costs: Costs) -> Seconds:
    """Predict a step."""
    one, m, stages = layout, layout.chunks, stage_seconds(works, layout, costs)
    each = [sum(stage.forward + stage.backward for stage in stages[r :: one.pp]) for r in range(one.pp)]
    slowest = max(range(one.pp), key=each.__getitem__)
    own = cut(works, one)[slowest :: one.pp]
    held = [work for stage in own for work in stage]
    parameters, trained = (sum(some) / one.tp for some in zip(*map(parameters_of, own), strict=True))
    tensor = sum(_tensor(work, one, costs) for work in held)
    passed = sum(borders(one.pp * one.per_rank)[slowest :: one.pp]) * _message(works, one, costs)
    compute = each[slowest] - tensor - passed
    gradients, shards = _replicas(held, parameters, trained, compute, one, costs)
    whole = duration(stages, one.pp, m, one.schedule) if one.pp > 1 else m * each[slowest]
    if one.pp > 1:  # what the first and the last stage share
        tied = sum(work.tied_trained for work in works)
        gradients += costs.reduce(4 * tied / one.tp, 2, 2 if one.processes <= costs.devices else 1)
    part = slowed(stages, whole, one, costs)
    reduced = one.per_rank if one.shards == 1 else 1  # DDP reduces each stage's gradients apart
    # The first micro-batch passes through all stages in turn.
    first, ours = (sum(costs.begin(work, one.samples) for work in some) for some in (works, held))
    return Seconds(
        compute=part * (m * compute + ours),
        bubble=part * (whole - m * each[slowest] + first - ours),
        tensor=m * tensor,
        stages=m * passed,
        gradients=gradients,
        shards=shards,
        optimizer=costs.optimizer(trained / one.shards) + costs.fixed(one.dp, reduced),
    )


def slowed(stages: Sequence[StageSeconds], whole: float, one: PlannedLayout, costs: Costs) -> float:
    """Return how many times as long computing takes, where in ``whole`` seconds ranks wait for each other."""
    work = one.dp * one.chunks * sum(stage.forward + stage.backward for stage in stages)
    return costs.slowed(work / whole, one.samples)


def stage_seconds(works: Works, layout: PlannedLayout, costs: Costs) -> list[StageSeconds]:
    """Return how long each stage takes for a micro-batch, its messages, which a rank waits for, included."""
    one, seconds, message = layout, [], _message(works, layout, costs)
    for stage, beside in zip(cut(works, one), borders(one.pp * one.per_rank), strict=True):
        forward = sum(costs.forward(work, one.samples, one.tp) for work in stage)
        both = sum(_computed(work, one, costs, work is not works[-1]) for work in stage)
        tensor = sum(_tensor(work, one, costs) for work in stage)
        passed = beside / 2 * message  # half of a message is its sender's, half its receiver's
        ahead = forward + tensor / (3 if one.recompute == "full" else 2) + passed
        behind = both + tensor + 2 * passed - ahead
        seconds.append(StageSeconds(ahead, behind, behind / 2, behind / 2 * (UNMEASURED.weights / UNMEASURED.inputs)))
    return seconds


def _computed(work: LayerWork, one: PlannedLayout, costs: Costs, again: bool) -> float:
    """Seconds of a micro-batch in a layer; the last one, which has the loss, is not computed ``again``."""
    forward, backward = (of(work, one.samples, one.tp) for of in (costs.forward, costs.backward))
    more = {"none": 0.0, "full": forward, "selective": costs.attention(work, one.samples, one.tp)}
    return forward + backward + again * more[one.recompute]


def _tensor(work: LayerWork, one: PlannedLayout, costs: Costs) -> float:
    """Two all-reduces of a block's forward, two of its backward, and two where the forward is computed again."""
    times = (6 if one.recompute == "full" else 4) if work.attention else 0
    return times * costs.reduce(work.output * one.samples, one.tp, min(one.tp, costs.devices))


def _message(works: Works, one: PlannedLayout, costs: Costs) -> float:
    """Seconds of a micro-batch's message between two stages, one way."""
    if one.pp == 1:
        return 0.0
    apart = one.tp * (one.dp if one.order == "pp_dp" else 1)  # how far the next stage's rank is
    size = max(work.output for work in works[:-1]) * one.samples / one.tp
    return costs.message(size, one.pp * apart <= costs.devices, one.schedule)


def _replicas(
    held: Works, parameters: float, trained: float, compute: float, one: PlannedLayout, costs: Costs
) -> tuple[float, float]:
    """Seconds for gradients, and for shared parameters, that the ``compute`` of a micro-batch does not hide."""
    if one.dp == 1:
        return 0.0, 0.0
    per_node = max(1, costs.devices // (one.tp * (1 if one.order == "pp_dp" else one.pp)))
    if one.shards == 1:
        reduced = costs.reduce(4 * trained, one.dp, min(one.dp, per_node))
        hidden = costs.hides[0] * min(reduced, compute * 2 / 3) if one.overlaps else 0.0
        return reduced - hidden, 0.0
    size = costs.gathered * parameters
    whole = costs.gather(size, one.shards, min(one.shards, per_node), held)
    groups = one.dp // one.shards
    outer = costs.reduce(costs.gathered * trained / one.shards, groups, max(1, per_node // one.shards))
    each = 3 * whole if one.resharded else 2 * whole / one.chunks + costs.hooks(held)  # with the gradients
    each += outer / one.chunks
    hidden = costs.hides[1] * min(each, compute)
    return 0.0, one.chunks * (each - hidden)
