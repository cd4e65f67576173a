"""The order of interleaved_split_drain, in a run where a forward takes one tick and a backward two."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    ScheduleInterleaved1F1B,
)

from parallel.schedules import ideal_bubble, in_flight
from parallel.split_drain import split_drain

TICKS = {FORWARD: 1, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1, FULL_BACKWARD: 2}
SIZES = [(2, 2, 2), (2, 2, 8), (2, 3, 6), (2, 1, 8), (3, 1, 9), (4, 1, 8), (4, 2, 8), (4, 2, 16)]


def interleaved(ranks: int, per_rank: int, chunks: int) -> dict:
    """torch's order, which needs no processes."""
    schedule = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = ranks, per_rank, chunks
    schedule.number_of_rounds = max(1, chunks // ranks)
    schedule.microbatches_per_round = chunks // schedule.number_of_rounds
    return {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}


def span(orders: dict) -> int:
    """Ticks until all is done, every action as early as its rank and what it needs let it be."""
    last = max(action.stage_index for actions in orders.values() for action in actions)
    clock, ended, left = dict.fromkeys(orders, 0), {}, {rank: list(actions) for rank, actions in orders.items()}
    while any(left.values()):
        before = sum(map(len, left.values()))
        for rank, actions in left.items():
            while actions and (needed := needs(actions[0], last)) <= ended.keys():
                done = actions.pop(0)
                clock[rank] = max([clock[rank], *(ended[one] for one in needed)]) + TICKS[done.computation_type]
                ended[part(done.computation_type), done.stage_index, done.microbatch_index] = clock[rank]
        assert sum(map(len, left.values())) < before, f"nothing can go on: {left}"
    return max(clock.values())


def part(kind) -> str:
    return {FORWARD: "forward", BACKWARD_WEIGHT: "weight"}.get(kind, "input")


def needs(action, last: int) -> set:
    kind, stage, chunk = part(action.computation_type), action.stage_index, action.microbatch_index
    if kind == "weight":
        return {("input", stage, chunk)}
    if kind == "forward":
        return {("forward", stage - 1, chunk)} if stage else set()
    return {("forward", stage, chunk)} | ({("input", stage + 1, chunk)} if stage < last else set())


@pytest.mark.parametrize("ranks, per_rank, chunks", SIZES)
def test_it_leaves_idle_what_is_said_of_it_and_less_than_interleaved_1f1b(ranks, per_rank, chunks):
    orders = interleaved(ranks, per_rank, chunks)
    work = 3 * per_rank * chunks
    bubble = 1 - work / span(split_drain(orders, chunks))
    ideal = ideal_bubble("interleaved_split_drain", ranks, chunks, per_rank)
    at_most = (ranks - 1 + (ranks >= 4)) / (work + ranks - 1)  # a tick more
    assert ideal - 1e-9 <= bubble <= at_most + 1e-9
    whole = {rank: [action for action in actions if action] for rank, actions in orders.items()}
    assert bubble < 1 - work / span(whole)


@pytest.mark.parametrize("ranks, per_rank, chunks", SIZES)
def test_every_gradient_is_taken_once_and_only_the_last_are_taken_apart(ranks, per_rank, chunks):
    for rank, actions in split_drain(interleaved(ranks, per_rank, chunks), chunks).items():
        stages = [rank + ranks * i for i in range(per_rank)]
        every = {(stage, chunk) for stage in stages for chunk in range(chunks)}
        apart = {(stage, chunk) for stage, chunk in every if stage > 0 and chunk >= chunks - 2 * (ranks - 1)}
        done = {kind: set() for kind in TICKS}
        for action in actions:
            done[action.computation_type].add((action.stage_index, action.microbatch_index))
        assert done[FORWARD] == every and done[FULL_BACKWARD] == every - apart
        assert done[BACKWARD_INPUT] == done[BACKWARD_WEIGHT] == apart
        assert len(actions) == 2 * len(every) + len(apart)


def most_held(actions: list) -> int:
    """Forwards whose activations some gradient still needs, of all stages of a rank."""
    held, most = 0, 0
    for action in actions:
        held += {FORWARD: 1, BACKWARD_INPUT: 0}.get(action.computation_type, -1)
        most = max(most, held)
    return most


@pytest.mark.parametrize("ranks, per_rank, chunks", [*SIZES, (8, 2, 32)])
def test_a_rank_holds_no_more_activations_than_is_said_of_it(ranks, per_rank, chunks):
    whole = interleaved(ranks, per_rank, chunks)
    for rank, actions in split_drain(whole, chunks).items():
        sizes = ranks, chunks, per_rank, rank
        assert most_held(actions) <= per_rank * in_flight("interleaved_split_drain", *sizes)
        assert most_held(list(filter(None, whole[rank]))) <= per_rank * in_flight("interleaved_1f1b", *sizes)
