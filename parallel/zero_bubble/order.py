"""The order of a pipeline's work with the shortest simulated makespan, given the time of each stage.

Zero-bubble schedules (Qi et al. 2023, who also plan orders) split the backward: gradients of inputs are sent to the
previous stage at once, and gradients of weights, for which no other rank waits, fill gaps. A split backward costs a
little more than a whole one, so only the backwards of the last micro-batches are split here, as many as shorten the
step.

An order is made by list scheduling: the rank that can act first acts, again and again. It prefers a backward to a
forward and the deepest stage to other stages, and computes a weight gradient if it has no other work. This is repeated
with more and fewer split backwards and with more and less memory, and the shortest order is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parallel.actions import UNMEASURED, Action, Orders, StageSeconds
from parallel.schedules import max_in_flight
from parallel.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD


class Candidate(NamedTuple):
    """An action that a rank could take next. The smallest candidate is taken, compared field by field.

    An earlier micro-batch's backward comes first, so that gradients are always summed in one order.

    Attributes:
        start: The time at which the action could begin.
        urgency: 0 for a backward, 1 for a forward, 2 for a weight gradient.
        microbatch: The backward's micro-batch; 0 for other work.
        depth: The negative index of the stage, so that the deepest stage comes first.
        rank: The rank that acts.
        action: The action.
    """

    start: float
    urgency: int
    microbatch: int
    depth: int
    rank: int
    action: Action


# The time to send a tensor to the neighbor, as a fraction of a forward's time; a rough estimate.
_TRANSFER = 0.03
# The smallest relative gain for which more memory, or more split backwards, are used.
_LEAST_GAIN = 0.003
# The time that a rank with remaining weight gradients waits for more urgent work, as a fraction of the gradients' time.
_PATIENCE = (0.0, 0.5)


def best_order(seconds: Sequence[StageSeconds], ranks: int, chunks: int) -> Orders:
    """Find the order with the shortest simulated makespan, the same on every rank.

    No rank holds more activations than ``max_in_flight`` allows. Stage i runs on rank i % ``ranks``.
    """
    best: Orders = {}
    shortest = math.inf
    for spare in dict.fromkeys((0, ranks // 2, ranks)):
        limits = _limits(len(seconds), ranks, chunks, spare)
        for split in _split_counts(ranks, chunks):
            for patience in _PATIENCE:
                planned = _ListScheduling(seconds, ranks, chunks, limits, split, patience)
                if planned.end < (1 - _LEAST_GAIN) * shortest:
                    best, shortest = planned.orders, planned.end
    return best


def expected_makespan(costs: Sequence[float], ranks: int, chunks: int) -> float:
    """Estimate the makespan of the best order, in the unit of ``costs``, from two orders only."""
    scale = UNMEASURED.forward + UNMEASURED.backward
    seconds = [StageSeconds(*(cost / scale * part for part in UNMEASURED)) for cost in costs]
    limits = _limits(len(costs), ranks, chunks, spare=ranks)
    return min(
        _ListScheduling(seconds, ranks, chunks, limits, split, patience=0.0).end
        for split in {0, min(chunks, 2 * (ranks - 1))}
    )


def _limits(stages: int, ranks: int, chunks: int, spare: int) -> list[int]:
    return [max_in_flight(ranks, chunks, stages // ranks, rank, spare) for rank in range(ranks)]


def _split_counts(ranks: int, chunks: int) -> list[int]:
    """Return the numbers of split backwards to try, ascending, around the 2 (p - 1) that fill equal stages' gaps."""
    number, numbers = ranks - 1, {0, 1, chunks}
    while 0 < number < chunks:
        numbers.add(number)
        number *= 2
    return sorted(numbers)


@dataclass
class _ListScheduling:
    """A list schedule: its ``orders``, and the time ``end`` at which the last rank finishes.

    Attributes:
        limits: The number of activations that each rank may hold until the gradients of their weights are computed.
            There is one activation for each stage and micro-batch.
        split: The number of the last micro-batches that have a split backward. The first stage's backward stays whole,
            because its input needs no gradient.
        patience: The longest time until more urgent work for which a rank waits, as a fraction of a weight gradient's
            time.
    """

    seconds: Sequence[StageSeconds]
    ranks: int
    chunks: int
    limits: Sequence[int]
    split: int
    patience: float
    orders: Orders = field(init=False)
    end: float = field(init=False)

    def __post_init__(self) -> None:
        stages, ranks = len(self.seconds), range(self.ranks)
        self.orders = {rank: [] for rank in ranks}
        self._transfer = _TRANSFER * sum(stage.forward for stage in self.seconds) / stages
        self._clock = [0.0 for _ in ranks]
        self._holds = [0 for _ in ranks]
        self._postponed: list[list[Action]] = [[] for _ in ranks]
        self._forward_ended: list[list[float]] = [[] for _ in range(stages)]  # per stage, for micro-batches 0, 1, …
        self._backward_ended: list[list[float]] = [[] for _ in range(stages)]
        upcoming = {rank: self._next(rank) for rank in ranks}
        while (first := min(filter(None, upcoming.values()), default=None)) is not None:
            self._act(first)
            for changed in {first.rank, (first.rank + 1) % self.ranks, (first.rank - 1) % self.ranks}:
                upcoming[changed] = self._next(changed)
        self.end = max(self._clock)

    def _next(self, rank: int) -> Candidate | None:
        now, stages = self._clock[rank], range(rank, len(self.seconds), self.ranks)
        possible = []
        for i, stage in enumerate(stages):
            chunk = len(self._backward_ended[stage])
            if chunk < self.chunks and (ready := self._backward_ready(stage, chunk)) < math.inf:
                split = stage > 0 and chunk >= self.chunks - self.split
                action = Action(stage, BACKWARD_INPUT if split else BACKWARD, chunk)
                possible.append(Candidate(max(ready, now), 0, chunk, -stage, rank, action))
            chunk = len(self._forward_ended[stage])
            # One activation is kept free for each later stage of the rank; otherwise no gradient could return.
            free = self._holds[rank] + len(stages) - i <= self.limits[rank]
            if chunk < self.chunks and free and (ready := self._forward_ready(stage, chunk)) < math.inf:
                possible.append(Candidate(max(ready, now), 1, 0, -stage, rank, Action(stage, FORWARD, chunk)))
        if self._postponed[rank]:
            weights = self._postponed[rank][0]
            soon = now + self.patience * self.seconds[weights.stage].weights
            if not any(candidate.start <= soon for candidate in possible):
                return Candidate(now, 2, 0, 0, rank, weights)
        return min(possible, default=None)

    def _forward_ready(self, stage: int, chunk: int) -> float:
        """Return the time at which the forward's input arrives; infinity if the time is not known yet."""
        if stage == 0:
            return 0.0
        before = self._forward_ended[stage - 1]
        return before[chunk] + self._transfer if chunk < len(before) else math.inf

    def _backward_ready(self, stage: int, chunk: int) -> float:
        forwards = self._forward_ended[stage]
        if chunk >= len(forwards):
            return math.inf
        if stage == len(self.seconds) - 1:
            return forwards[chunk]
        after = self._backward_ended[stage + 1]
        return after[chunk] + self._transfer if chunk < len(after) else math.inf

    def _act(self, candidate: Candidate) -> None:
        rank, (stage, kind, chunk) = candidate.rank, candidate.action
        end = candidate.start + self.seconds[stage].of(kind)
        if kind == FORWARD:
            self._forward_ended[stage].append(end)
            self._holds[rank] += 1
        elif kind == BACKWARD_WEIGHT:
            self._postponed[rank].pop(0)
            self._holds[rank] -= 1
        else:
            self._backward_ended[stage].append(end)
            if kind == BACKWARD_INPUT:
                self._postponed[rank].append(Action(stage, BACKWARD_WEIGHT, chunk))
            else:
                self._holds[rank] -= 1
        self._clock[rank] = end
        self.orders[rank].append(candidate.action)
