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
    """Return the seconds as they are spent: the first stage's input needs no gradient, so its backward has one part.

    torch does all of it in what it calls the second part, and a planned order never takes it apart.
    """
    first, *others = seconds
    if schedule == "interleaved_zero_bubble":
        first = first._replace(inputs=0.0, weights=first.backward)
    elif schedule == "planned":
        first = first._replace(inputs=first.backward, weights=0.0)
    return [first, *others]


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


def makespan(seconds: Sequence[StageSeconds], ranks: int, chunks: int, schedule: str, transfer: float) -> float:
    """Return about how long ``simulate`` says that a step takes, in a time that does not depend on ``chunks``."""
    stages, arrives = _as_run(seconds, schedule), transfer if ranks > 1 else 0.0
    forward, backward, inputs, weights = map(list, zip(*stages, strict=True))
    none = [0.0] * len(stages)
    if schedule in ("gpipe", "looped_bfs"):
        both = forward, backward[::-1]
        return sum(_passes(times, none, ranks, chunks, chunks, arrives) for times in both)
    whole, split = (forward, backward, none), (forward, inputs, weights)
    if schedule == "planned":  # as many split backwards and as much memory as pay
        kinds = [(parts, spare) for parts in (whole, split) for spare in (0, ranks // 2, ranks)]
        return min(_alternating(*parts, ranks, chunks, arrives, 2, spare) for parts, spare in kinds)
    parts, ahead = (whole, 2) if schedule == "interleaved_1f1b" else (whole if schedule == "1f1b" else split, 1)
    return _alternating(*parts, ranks, chunks, arrives, ahead)


def _passes(
    times: Sequence[float], more: Sequence[float], ranks: int, chunks: int, last: int, transfer: float
) -> float:
    """Return when the last stage is done with ``last`` micro-batches, of which the others do ``chunks`` in a row.

    A rank has more to do after each, for which the next stage does not wait.
    """
    ends = [0.0] * len(times)
    for first in (0, *range(ranks, len(times))):
        total, slowest = ends[first - ranks] + more[first - ranks] if first else 0.0, 0.0
        for stage in range(first, len(times)):
            total += times[stage] + transfer * (stage > first)
            slowest = max(slowest, times[stage] + more[stage])
            times_again = (chunks if stage < len(times) - ranks else last) - 1
            ends[stage] = max(ends[stage], total + times_again * slowest)
    return ends[-1]


def _alternating(
    forward: list[float],
    backward: list[float],
    weights: list[float],
    ranks: int,
    chunks: int,
    transfer: float,
    ahead: int,
    spare: int = 0,
) -> float:
    """Return the makespan of orders that alternate between forwards and backwards.

    It is that of the longest of these paths: until a rank's first backward, from there on what that rank does until its
    last forward, and from there on to the end.

    Args:
        forward: The seconds of each stage's forward.
        backward: Those of the backward for which the stage before waits.
        weights: Those of the rest of it.
        ranks: The number of ranks.
        chunks: The number of micro-batches.
        transfer: The seconds to the next rank.
        ahead: How many forwards more a rank does before its first backward than the next rank does.
        spare: How many more all do.
    """
    size, per_rank = chunks // max(1, chunks // ranks), len(forward) // ranks  # of a round, in micro-batches
    total, upper = per_rank * chunks, len(forward) - ranks  # a rank's forwards; rank 0's last stage
    warm = [min(total, (per_rank - 1) * size + ahead * (ranks - 1 - r) + 1 + spare) for r in range(ranks)]

    def some(times: list[float], rank: int, count: int, step: int) -> float:
        """The seconds of the first ``count`` in rounds over the rank's stages, upwards or downwards."""
        rounds, rest = divmod(count, size * per_rank)
        own = times[rank::ranks][::step]
        return rounds * size * sum(own) + sum(min(size, max(0, rest - size * i)) * one for i, one in enumerate(own))

    def way(times: list[float], low: int, high: int) -> float:
        """The seconds from a stage to a later one, or back, without the ``low`` one's own."""
        return sum(times[low + 1 : high + 1]) + (high - low) * transfer

    start = _passes(forward, [0.0] * len(forward), ranks, size, 1, transfer)
    end = _passes(backward[::-1], weights[::-1], ranks, size, 1, transfer) + weights[0]
    heads = [sum(forward[:r]) + r * transfer for r in range(ranks)]
    forwards, backwards, warmed, done, tails = [], [], [], [], []
    for r in range(ranks):
        forwards.append(chunks * sum(forward[r::ranks]))
        backwards.append(chunks * (sum(backward[r::ranks]) + sum(weights[r::ranks])))
        warmed.append(some(forward, r, warm[r], 1))
        pairs = total - warm[r]
        done.append(some(backward, r, pairs, -1) + some(weights, r, max(0, pairs - r), -1))
        left = min(r + 1, chunks) * weights[r]
        ways = [sum(backward[x:r]) + (r - x) * transfer + min(x + 1, chunks) * weights[x] for x in range(r + 1)]
        tails.append(max(ways) - left)
    longest = 0.0
    for r in range(ranks):
        others = range(r + 1, ranks)
        first = max(heads[q] + warmed[q] + way(backward, upper + r, upper + q) for q in range(r, ranks))
        first = max(first, start + way(backward, upper + r, upper + ranks - 1))
        final = [backwards[q] - done[q] + tails[q] + way(forward, upper + r, upper + q) for q in others]
        final.append(way(forward, upper + r, upper + ranks - 1) + end)
        if warm[r] == total:
            longest = max(longest, first + backwards[r] + tails[r], heads[r] + forwards[r] + max(final))
            continue
        # Where a rank waits for others in turn: it hands on a micro-batch, and gets it back when it has done so many.
        one, cycle, waits = (forwards[r] + backwards[r]) / total, 0.0, 0.0
        cycle = sum(forward[r::ranks] + backward[r::ranks] + weights[r::ranks]) / per_rank
        for q in others:
            cycle += sum(forward[q::ranks] + backward[q::ranks]) / per_rank + 2 * transfer
            covers = 1 + ahead * (q - r)
            waits = max(waits, (total - warm[r]) // covers * (cycle - covers * one))
        final.append(backwards[r] - done[r] + tails[r])
        longest = max(longest, first + forwards[r] - warmed[r] + done[r] + max(final) + waits)
    return longest
