"""When each piece of a pipeline's work runs, given how long each stage takes: replayed, and in a formula."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pkgutil import resolve_name
from types import SimpleNamespace

from parallel.schedules import SCHEDULES
from parallel.timeline import (
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    Interval,
)
from parallel.zero_bubble.order import Action, Orders, StageSeconds, best_order
from parallel.zero_bubble.schedule import ACTIONS

_KINDS = {torchs: kind for kind, torchs in ACTIONS.items()}


def simulate(
    seconds: Sequence[StageSeconds], ranks: int, chunks: int, schedule: str, transfer: float
) -> dict[int, list[Interval]]:
    """Return what each rank does in a step, and when, if stage i runs on rank i % ``ranks``.

    A tensor reaches another rank ``transfer`` seconds after it is computed, and keeps no rank from computing.
    """
    seconds = _as_run(seconds, schedule)
    return replay(order(seconds, ranks, chunks, schedule), seconds, transfer)


def order(seconds: Sequence[StageSeconds], ranks: int, chunks: int, schedule: str) -> Orders:
    """Return what each rank computes, in the order in which a run does it."""
    if schedule == "planned":
        return best_order(seconds, ranks, chunks)
    if SCHEDULES[schedule].looped:
        return _order_of_torch(schedule, ranks, chunks, len(seconds))
    return {rank: _plain_order(rank, chunks, chunks if schedule == "gpipe" else ranks - rank) for rank in range(ranks)}


def _plain_order(stage: int, chunks: int, ahead: int) -> list[Action]:
    """Return the work of a rank with one stage, whose forwards are up to ``ahead`` micro-batches ahead."""
    actions = [Action(stage, FORWARD, chunk) for chunk in range(min(ahead, chunks))]
    for chunk in range(chunks):
        actions.append(Action(stage, BACKWARD, chunk))
        if chunk + ahead < chunks:
            actions.append(Action(stage, FORWARD, chunk + ahead))
    return actions


def _order_of_torch(schedule: str, ranks: int, chunks: int, stages: int) -> Orders:
    """Return the order that torch's class makes as it is constructed, for which it reads four numbers of its stages.

    As of torch 2.13: those below, and ``pipeline_order`` and ``_Action``, are no public interface.
    """
    stage = SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, submod=None)
    made = resolve_name(SCHEDULES[schedule].class_name)([stage] * (stages // ranks), chunks)
    return {
        rank: [Action(a.stage_index, _KINDS[a.computation_type], a.microbatch_index) for a in actions if a is not None]
        for rank, actions in made.pipeline_order.items()
    }


def _as_run(seconds: Sequence[StageSeconds], schedule: str) -> Sequence[StageSeconds]:
    """Return the seconds as they are spent: torch does all of the first stage's split backward in the second part."""
    if schedule != "interleaved_zero_bubble":
        return seconds
    return [seconds[0]._replace(inputs=0.0, weights=seconds[0].backward), *seconds[1:]]


def replay(orders: Orders, seconds: Sequence[StageSeconds], transfer: float) -> dict[int, list[Interval]]:
    """Return when all ranks do what is in their orders, each as early as it can."""
    done: dict[int, list[Interval]] = {rank: [] for rank in orders}
    free, ended = dict.fromkeys(orders, 0.0), {}
    left = {rank: deque(actions) for rank, actions in orders.items()}
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, actions in left.items():
            while actions:
                stage, kind, chunk = actions[0]
                start = free[rank]
                sender = stage - 1 if kind == FORWARD else stage + 1
                if kind != BACKWARD_WEIGHT and 0 <= sender < len(seconds):
                    if (kind == FORWARD, sender, chunk) not in ended:
                        break
                    sent = ended[kind == FORWARD, sender, chunk]
                    if sender % len(orders) != rank:
                        start = max(start, sent + transfer)
                        receive = RECEIVE_ACTIVATION if kind == FORWARD else RECEIVE_GRADIENT
                        done[rank].append(Interval(receive, stage, chunk, free[rank], start))
                free[rank] = start + seconds[stage].of(kind)
                done[rank].append(Interval(kind, stage, chunk, start, free[rank]))
                if kind != BACKWARD_WEIGHT:
                    ended[kind == FORWARD, stage, chunk] = free[rank]
                actions.popleft()
                goes_on = True
    assert not any(left.values()), f"nothing can go on: {left}"
    return done
