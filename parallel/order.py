"""The order in which a pipeline's ranks work that ends earliest, given how long each stage takes.

Zero-bubble schedules (Qi et al. 2023, who plan theirs likewise) take the gradients of inputs and of weights apart: the
former go on to the neighbour at once, the latter, for which nobody waits, fill gaps. A backward in two parts costs a
little more than in one piece, so here only the last micro-batches' are, as many as pay.

An order is made by list scheduling: again and again the rank that can act first does, a backward before a forward, the
deepest stage's first, and a weight gradient where nothing else is there to do. That is tried with more and fewer
backwards in two parts, and with more and less memory; the order that ends first is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    _Action,
)

from parallel.schedules import max_in_flight

Orders = dict[int, list[_Action]]  # rank -> what it computes, in order

# Of a forward: what a tensor takes to the neighbour, by and large.
_TRANSFER = 0.03
# What more memory, or more backwards in two parts, must bring to be taken.
_LEAST_GAIN = 0.003
# A rank that has weight gradients left waits for something better that comes within this share of their time, or not.
_PATIENCE = (0.0, 0.5)


class StageSeconds(NamedTuple):
    """What one micro-batch takes in a stage: ``backward`` in one piece, or ``inputs`` and ``weights`` apart."""

    forward: float
    backward: float
    inputs: float
    weights: float


_FIELDS = {FORWARD: "forward", FULL_BACKWARD: "backward", BACKWARD_INPUT: "inputs", BACKWARD_WEIGHT: "weights"}

# Before anything is measured: the textbook's, and a little more for a backward in two parts.
UNMEASURED = StageSeconds(1.0, 2.0, 1.0, 1.05)


def best_order(seconds: Sequence[StageSeconds], ranks: int, chunks: int) -> Orders:
    """The order for ``chunks`` micro-batches that ends first; stage i runs on rank i % ranks. The same wherever it is
    worked out. No rank holds more activations than ``max_in_flight`` allows."""
    best, earliest = None, math.inf
    for spare in dict.fromkeys((0, ranks // 2, ranks)):
        held = _most_held(len(seconds), ranks, chunks, spare)
        for apart in _numbers_apart(ranks, chunks):
            for patience in _PATIENCE:
                planned = _ListScheduling(seconds, ranks, chunks, held, apart, patience)
                if planned.end < (1 - _LEAST_GAIN) * earliest:
                    best, earliest = planned.orders, planned.end
    return best


def expected_end(costs: Sequence[float], ranks: int, chunks: int) -> float:
    """About when the best order ends, found fast, for stages whose forward and backward together take ``costs``."""
    scale = UNMEASURED.forward + UNMEASURED.backward
    seconds = [StageSeconds(*(cost / scale * part for part in UNMEASURED)) for cost in costs]
    held = _most_held(len(costs), ranks, chunks, spare=ranks)
    return min(
        _ListScheduling(seconds, ranks, chunks, held, apart, patience=0.0).end
        for apart in {0, min(chunks, 2 * (ranks - 1))}
    )


def _most_held(stages: int, ranks: int, chunks: int, spare: int) -> list[int]:
    """Of each rank."""
    return [max_in_flight(ranks, chunks, stages // ranks, rank, spare) for rank in range(ranks)]


def _numbers_apart(ranks: int, chunks: int) -> list[int]:
    """How many micro-batches' backwards to try in two parts, ascending, around the 2 (p - 1) that fill the gaps where
    all takes as long as in theory."""
    number, numbers = ranks - 1, {0, 1, chunks}
    while 0 < number < chunks:
        numbers.add(number)
        number *= 2
    return sorted(numbers)


@dataclass
class _ListScheduling:
    """``orders``, and when the last rank is done.

    held      at most how many stages' activations of a micro-batch each rank holds, until its weights' gradients
    apart     how many of the last micro-batches have backwards in two parts. The first stage's stay whole: its input
              needs no gradient
    patience  of the time of a weight gradient: how soon something better must come for the rank to wait for it
    """

    seconds: Sequence[StageSeconds]
    ranks: int
    chunks: int
    held: Sequence[int]
    apart: int
    patience: float
    orders: Orders = field(init=False)
    end: float = field(init=False)

    def __post_init__(self) -> None:
        stages, ranks = len(self.seconds), range(self.ranks)
        self.orders = {rank: [] for rank in ranks}
        self._transfer = _TRANSFER * sum(stage.forward for stage in self.seconds) / stages
        self._clock = [0.0 for _ in ranks]
        self._holds = [0 for _ in ranks]
        self._put_off: list[list[_Action]] = [[] for _ in ranks]
        self._forward_ended: list[list[float]] = [[] for _ in range(stages)]  # of micro-batches 0, 1, …
        self._backward_ended: list[list[float]] = [[] for _ in range(stages)]
        upcoming = {rank: self._next(rank) for rank in ranks}
        while (first := min(filter(None, upcoming.values()), default=None)) is not None:
            start, *_, rank, action = first
            self._act(rank, start, action)
            for changed in {rank, (rank + 1) % self.ranks, (rank - 1) % self.ranks}:
                upcoming[changed] = self._next(changed)
        self.end = max(self._clock)

    def _next(self, rank: int) -> tuple | None:
        """(when, how urgent, …, rank, action): what this rank does next, as far as can be seen now."""
        found = []
        stages = range(rank, len(self.seconds), self.ranks)
        for i, stage in enumerate(stages):
            chunk = len(self._backward_ended[stage])
            if chunk < self.chunks:
                two_parts = stage > 0 and chunk >= self.chunks - self.apart
                action = _Action(stage, BACKWARD_INPUT if two_parts else FULL_BACKWARD, chunk)
                found.append((self._backward_ready(stage, chunk), 0, chunk, -stage, rank, action))
            chunk = len(self._forward_ended[stage])
            # Room stays for the rank's later stages, else what the earlier ones gave could never come back.
            if chunk < self.chunks and self._holds[rank] + len(stages) - i <= self.held[rank]:
                found.append((self._forward_ready(stage, chunk), 1, 0, -stage, rank, _Action(stage, FORWARD, chunk)))
        now = self._clock[rank]
        found = [(max(when, now), *rest) for when, *rest in found if when < math.inf]
        if self._put_off[rank]:
            weights = self._put_off[rank][0]
            soon = now + self.patience * self.seconds[weights.stage_index].weights
            if not any(when <= soon for when, *_ in found):
                found = [(now, 2, 0, 0, rank, weights)]
        return min(found, default=None)

    def _forward_ready(self, stage: int, chunk: int) -> float:
        """When its input is there; infinity where that cannot be said yet."""
        if stage == 0:
            return 0.0
        before = self._forward_ended[stage - 1]
        return before[chunk] + self._transfer if chunk < len(before) else math.inf

    def _backward_ready(self, stage: int, chunk: int) -> float:
        own = self._forward_ended[stage]
        if chunk >= len(own):
            return math.inf
        if stage == len(self.seconds) - 1:
            return own[chunk]
        after = self._backward_ended[stage + 1]
        return after[chunk] + self._transfer if chunk < len(after) else math.inf

    def _act(self, rank: int, start: float, action: _Action) -> None:
        stage, kind, chunk = action.stage_index, action.computation_type, action.microbatch_index
        end = start + getattr(self.seconds[stage], _FIELDS[kind])
        if kind == FORWARD:
            self._forward_ended[stage].append(end)
            self._holds[rank] += 1
        elif kind == BACKWARD_WEIGHT:
            self._put_off[rank].pop(0)
            self._holds[rank] -= 1
        else:
            self._backward_ended[stage].append(end)
            if kind == BACKWARD_INPUT:
                self._put_off[rank].append(_Action(stage, BACKWARD_WEIGHT, chunk))
            else:
                self._holds[rank] -= 1
        self._clock[rank] = end
        self.orders[rank].append(action)
