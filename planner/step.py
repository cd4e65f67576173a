"""The seconds and the bytes of a whole step in a layout, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from parallel.layout import Layout
from parallel.orders import UNMEASURED, StageSeconds
from parallel.plan import even_split
from parallel.schedules import borders, in_flight
from planner.costs import Costs
from planner.simulation import duration
from planner.work import LayerWork

Works = Sequence[LayerWork]


@dataclass(frozen=True)
class PlannedLayout(Layout):
    """A layout, and what else decides how long a step takes; tensor parallelism is planned on paper only.

    Attributes:
        tp: Ranks that share each layer.
        samples: Of a micro-batch.
        recompute: "none"; "full": of each layer only the input is kept; "selective": attention is computed again.
        scattered: Whether all that a layer's ranks hold is cut in ``tp`` (sequence parallelism).
        overlaps: Whether gradients are reduced while the last backward computes.
        ends_on_top: Whether equally many layers are dealt out before the first and the last one, as Megatron-LM does.
        node: Devices of a node.
    """

    AXES: ClassVar = ("dp", "tp", "pp")

    schedule: str = "gpipe"  # always one, of one process too
    tp: int = 1
    samples: int = 1
    recompute: str = "none"
    scattered: bool = True
    overlaps: bool = True
    ends_on_top: bool = False
    node: int = 1

    @property
    def processes(self) -> int:
        """The number of all ranks."""
        return super().processes * self.tp

    @property
    def group(self) -> int:
        """How many neighbouring replicas reduce gradients among themselves first; of hsdp those of a node."""
        by_node = self.shard is None and self.info.shards == "node"
        return max(1, self.node // (self.tp * self.pp)) if by_node else super().group

    @property
    def resharded(self) -> bool:
        """Whether shared parameters are whole one layer at a time."""
        return not self.pipelined if self.reshard is None else self.reshard

    def keys(self) -> dict[str, Any]:
        """Return what a planner chooses, as keys of the sections ``parallel`` and ``train``."""
        return {**super().keys(), "activation_checkpointing": self.recompute == "full"}

    def words(self) -> list[str]:
        """Return what is typed for it; tensor parallelism comes last."""
        words = super().words() + ["train.activation_checkpointing=true"] * (self.recompute == "full")
        return words + [f"tp={self.tp}"] * (self.tp > 1)

    @property
    def name(self) -> str:
        """The layout in a few words."""
        return super().name + " recompute" * (self.recompute == "full")


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


@dataclass(frozen=True)
class Bytes:
    """What the fullest rank holds, in bytes.

    Attributes:
        state: Weights, gradients and optimizer state.
        gathered: Shared parameters and gradients as far as they are whole, and weights in the compute dtype.
        activations: What is kept for backwards, and what one layer needs at a time.
        reserved: What no tensor gets: the process, and what its allocator cannot use.
    """

    state: float
    gathered: float
    activations: float
    reserved: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.state + self.gathered + self.activations + self.reserved


def cut(works: Works, layout: PlannedLayout) -> list[Works]:
    """Cut the layers into stages."""
    stages = layout.pp * layout.per_rank
    counts = list(layout.counts) or even_split(len(works) - 2 * layout.ends_on_top, stages)
    if layout.ends_on_top:
        counts[0] += 1
        counts[-1] += 1
    starts = [sum(counts[:i]) for i in range(stages)]
    return [works[start : start + count] for start, count in zip(starts, counts, strict=True)]


def seconds_of(works: Works, layout: PlannedLayout, costs: Costs) -> Seconds:
    """Predict a step."""
    one, m, stages = layout, layout.chunks, stage_seconds(works, layout, costs)
    each = [sum(stage.forward + stage.backward for stage in stages[r :: one.pp]) for r in range(one.pp)]
    slowest = max(range(one.pp), key=each.__getitem__)
    held = [work for stage in cut(works, one)[slowest :: one.pp] for work in stage]
    tensor = sum(_tensor(work, one, costs) for work in held)
    passed = sum(borders(one.pp * one.per_rank)[slowest :: one.pp]) * _message(works, one, costs)
    compute = each[slowest] - tensor - passed
    gradients, shards = _replicas(held, compute, one, costs)
    whole = duration(stages, one.pp, m, one.schedule) if one.pp > 1 else m * each[slowest]
    if one.pp > 1:  # what the first and the last stage share
        tied = sum(min(work.tied, work.trained) for work in works)
        gradients += costs.reduce(4 * tied / one.tp, 2, 2 if one.processes <= costs.devices else 1)
    part = slowed(stages, whole, one, costs)
    reduced = one.per_rank if one.shards == 1 else 1  # DDP reduces each stage's gradients apart
    # The first micro-batch passes through all stages in turn.
    first, own = (sum(costs.begin(work, one.samples) for work in some) for some in (works, held))
    return Seconds(
        compute=part * (m * compute + own),
        bubble=part * (whole - m * each[slowest] + first - own),
        tensor=m * tensor,
        stages=m * passed,
        gradients=gradients,
        shards=shards,
        optimizer=costs.optimizer(_trained(held, one) / one.shards) + costs.fixed(one.dp, reduced),
    )


def slowed(stages: Sequence[StageSeconds], whole: float, one: PlannedLayout, costs: Costs) -> float:
    """Return how many times as long computing takes, where in ``whole`` seconds ranks wait for each other."""
    work = one.dp * one.chunks * sum(stage.forward + stage.backward for stage in stages)
    return costs.slowed(work / whole, one.samples)


def _parameters(held: Works, one: PlannedLayout) -> float:
    """Return how many parameters a rank has; without a pipeline, tied ones once."""
    return sum(work.parameters - (work.tied if one.pp == 1 else 0) for work in held) / one.tp


def _trained(held: Works, one: PlannedLayout) -> float:
    """Return how many of them get gradients; without a pipeline, tied ones once."""
    return sum(work.trained - (min(work.tied, work.trained) if one.pp == 1 else 0) for work in held) / one.tp


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


def _replicas(held: Works, compute: float, one: PlannedLayout, costs: Costs) -> tuple[float, float]:
    """Seconds for gradients, and for shared parameters, that the ``compute`` of a micro-batch does not hide."""
    if one.dp == 1:
        return 0.0, 0.0
    parameters, trained = _parameters(held, one), _trained(held, one)
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


def bytes_of(works: Works, layout: PlannedLayout, costs: Costs, reserved: float, states: int = 2) -> Bytes:
    """Predict the memory of the fullest rank, whose optimizer keeps ``states`` tensors of each parameter (Adam: 2)."""
    one, held = layout, []
    stages, largest = cut(works, one), max(work.parameters for work in works) / one.tp
    uncut = 1 if one.scattered else (10 * one.tp + 24) / 34  # 10 of 34 bytes are not cut (Korthikanti et al. 2022)
    for rank in range(one.pp):
        own = [work for stage in stages[rank :: one.pp] for work in stage]
        parameters, trained = _parameters(own, one), _trained(own, one)
        flight = 1
        if one.pp > 1:
            flight = in_flight(one.schedule, one.pp, one.chunks, one.per_rank, rank)
        kept = [work.kept * one.samples / one.tp * uncut for work in own]
        inputs = [work.output * one.samples / (one.tp if one.scattered else 1) for work in own]
        activations = flight * sum(kept)
        if one.recompute == "full":
            again = [work is not works[-1] for work in own]  # and then only one layer's are there at a time
            activations = flight * sum(i if a else k for i, k, a in zip(inputs, kept, again, strict=True))
            activations += max((k for k, a in zip(kept, again, strict=True) if a), default=0.0)
        cast = costs.itemsize * parameters if costs.itemsize < 4 else 0.0
        if one.dp > 1 and costs.heap:
            # What is freed stays: the gradients that have moved into buckets; whole parameters and their gradients.
            cast += 4 * parameters * costs.copies[0 if one.shards == 1 else 1 if one.resharded else 2]
        elif one.shards > 1 and one.resharded:
            cast = min(cast or 4 * parameters, 2 * costs.itemsize * largest) + 4 * largest
        elif one.shards > 1:
            cast = (cast or 4 * parameters) + 4 * trained
        state = 4 * (parameters + (1 + states) * trained) / one.shards
        held.append(Bytes(state, cast, activations, reserved + costs.heap * (state + cast + activations)))
    return max(held, key=lambda one: one.total)
