"""Orders of a pipeline's work: torch's interleaved 1F1B, and how long one takes."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.pipelining import schedules

from parallel.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from parallel.zero_bubble.order import Action, StageSeconds

PART = {FORWARD: "forward", BACKWARD: "backward", BACKWARD_INPUT: "inputs", BACKWARD_WEIGHT: "weights"}
KINDS = {schedules.FORWARD: FORWARD, schedules.FULL_BACKWARD: BACKWARD}


def interleaved(ranks: int, per_rank: int, chunks: int) -> dict:
    """torch's order, which needs no processes."""
    schedule = schedules.ScheduleInterleaved1F1B.__new__(schedules.ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = ranks, per_rank, chunks
    schedule.number_of_rounds = max(1, chunks // ranks)
    schedule.microbatches_per_round = chunks // schedule.number_of_rounds
    orders = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return {
        rank: [
            Action(one.stage_index, KINDS[one.computation_type], one.microbatch_index)
            for one in actions
            if one is not None and one.computation_type in KINDS
        ]
        for rank, actions in orders.items()
    }


def span(orders: dict, seconds: Sequence[StageSeconds]) -> float:
    """How long all takes, every action as early as its rank and what it needs let it be."""
    last = len(seconds) - 1
    clock, ended, left = dict.fromkeys(orders, 0.0), {}, {rank: list(actions) for rank, actions in orders.items()}
    while any(left.values()):
        before = sum(map(len, left.values()))
        for rank, actions in left.items():
            while actions and (needed := needs(actions[0], last)) <= ended.keys():
                stage, kind, chunk = actions.pop(0)
                takes = getattr(seconds[stage], PART[kind])
                clock[rank] = max([clock[rank], *(ended[one] for one in needed)]) + takes
                ended[part(kind), stage, chunk] = clock[rank]
        assert sum(map(len, left.values())) < before, f"nothing can go on: {left}"
    return max(clock.values())


def part(kind) -> str:
    return {FORWARD: "forward", BACKWARD_WEIGHT: "weight"}.get(kind, "input")


def needs(action, last: int) -> set:
    kind, stage, chunk = part(action.kind), action.stage, action.microbatch
    if kind == "weight":
        return {("input", stage, chunk)}
    if kind == "forward":
        return {("forward", stage - 1, chunk)} if stage else set()
    return {("forward", stage, chunk)} | ({("input", stage + 1, chunk)} if stage < last else set())
