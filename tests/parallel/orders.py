"""Orders of a pipeline's work: torch's interleaved 1F1B, and how long one takes."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    ScheduleInterleaved1F1B,
)

from parallel.order import StageSeconds

PART = {FORWARD: "forward", FULL_BACKWARD: "backward", BACKWARD_INPUT: "inputs", BACKWARD_WEIGHT: "weights"}


def interleaved(ranks: int, per_rank: int, chunks: int) -> dict:
    """torch's order, which needs no processes."""
    schedule = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = ranks, per_rank, chunks
    schedule.number_of_rounds = max(1, chunks // ranks)
    schedule.microbatches_per_round = chunks // schedule.number_of_rounds
    orders = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return {rank: [action for action in actions if action is not None] for rank, actions in orders.items()}


def span(orders: dict, seconds: Sequence[StageSeconds]) -> float:
    """How long all takes, every action as early as its rank and what it needs let it be."""
    last = len(seconds) - 1
    clock, ended, left = dict.fromkeys(orders, 0.0), {}, {rank: list(actions) for rank, actions in orders.items()}
    while any(left.values()):
        before = sum(map(len, left.values()))
        for rank, actions in left.items():
            while actions and (needed := needs(actions[0], last)) <= ended.keys():
                stage, kind, chunk = (done := actions.pop(0)).stage_index, done.computation_type, done.microbatch_index
                takes = getattr(seconds[stage], PART[kind])
                clock[rank] = max([clock[rank], *(ended[one] for one in needed)]) + takes
                ended[part(kind), stage, chunk] = clock[rank]
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
