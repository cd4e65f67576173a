"""Interleaved 1F1B whose last micro-batches take the gradients of inputs and of weights apart.

While a pipeline drains, ranks wait for gradients from those behind them, or for the end. Zero-bubble schedules (Qi et
al. 2023) fill the gaps with weight gradients, which nobody waits for, but they take every backward apart, and one in
two parts costs more. Here only those of the last 2 (p - 1) micro-batches are, for p ranks: fewer leave gaps that they
could fill, more fill none. Inputs' gradients go on to the neighbour at once, weights' follow where the rank would wait.
"""

from __future__ import annotations

import math

from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    ScheduleInterleaved1F1B,
    _Action,
)

Orders = dict[int, list[_Action]]  # rank -> what it computes, in order


class ScheduleInterleavedSplitDrain(ScheduleInterleaved1F1B):
    """torch's ``ScheduleInterleaved1F1B`` in another order; torch adds sends and receives to it, and runs it."""

    def _prepare_schedule_with_comms(self, actions: dict[int, list[_Action | None]], format="compute_only") -> None:
        self.pipeline_order = split_drain(actions, self._n_microbatches)
        super()._prepare_schedule_with_comms(self.pipeline_order, format)


def split_drain(orders: dict[int, list[_Action | None]], chunks: int) -> Orders:
    """``orders`` of forwards and backwards for ``chunks`` micro-batches, with the last ones' backwards in two parts."""
    return _weights_where_it_waits(_take_apart(orders, since=chunks - 2 * (len(orders) - 1)))


def _take_apart(orders: dict[int, list[_Action | None]], since: int) -> Orders:
    """``orders`` with only the inputs' gradients where there were backwards of micro-batches from ``since`` on. The
    first stage's stay whole: its input needs no gradient."""

    def apart(action: _Action) -> _Action:
        stage, kind, chunk = action.stage_index, action.computation_type, action.microbatch_index
        split = kind == FULL_BACKWARD and stage > 0 and chunk >= since
        return action._replace(computation_type=BACKWARD_INPUT) if split else action

    return {rank: [apart(action) for action in actions if action is not None] for rank, actions in orders.items()}


def _weights_where_it_waits(orders: Orders) -> Orders:
    """``orders`` with a weight gradient for every input gradient, put off to where its rank would wait, or to the end.

    It would wait as in an ideal run: a forward takes as long as either half of a backward, sending takes no time.
    """
    stages = 1 + max(action.stage_index for actions in orders.values() for action in actions)
    ended: dict[tuple[bool, int, int], int] = {}  # whether a forward, stage, micro-batch -> time
    clock = dict.fromkeys(orders, 0)
    to_come = {rank: list(actions) for rank, actions in orders.items()}
    put_off: Orders = {rank: [] for rank in orders}
    placed: Orders = {rank: [] for rank in orders}
    while unfinished := [rank for rank in orders if to_come[rank] or put_off[rank]]:
        # The rank that is behind in time acts next, so that what the others have ended by then is known.
        rank = min(unfinished, key=clock.__getitem__)
        if to_come[rank] and _ready(to_come[rank][0], ended, stages) <= clock[rank]:
            action = to_come[rank].pop(0)
            stage, kind, chunk = action.stage_index, action.computation_type, action.microbatch_index
            clock[rank] += 2 if kind == FULL_BACKWARD else 1
            ended[kind == FORWARD, stage, chunk] = clock[rank]
            placed[rank].append(action)
            if kind == BACKWARD_INPUT:
                put_off[rank].append(_Action(stage, BACKWARD_WEIGHT, chunk))
        else:
            clock[rank] += 1
            if put_off[rank]:
                placed[rank].append(put_off[rank].pop(0))
    return placed


def _ready(action: _Action, ended: dict[tuple[bool, int, int], int], stages: int) -> float:
    """When what ``action`` works on is there; infinity where that is not known yet."""
    forward, stage, chunk = action.computation_type == FORWARD, action.stage_index, action.microbatch_index
    if stage == (0 if forward else stages - 1):
        return 0
    return ended.get((forward, stage - 1 if forward else stage + 1, chunk), math.inf)
