"""Pipeline schedules: their names, what each asks of the chunk count, and the bubble of an ideal run.

p ranks, m chunks (micro-batches), v stages a rank; a backward takes two forwards' time, half of it for the inputs'
gradients and half for the weights':

    gpipe                    all forwards, then all backwards                   bubble (p-1) / (m + p-1)
    1f1b                     as gpipe, but a backward as soon as there is one:   the same, in less memory
    interleaved_1f1b         1f1b with several stages a rank, dealt round robin  bubble (p-1) / (v m + p-1)
    looped_bfs               gpipe with several stages a rank                    bubble (p-1) / (v m + p-1)
    interleaved_zero_bubble  interleaved_1f1b whose weight gradients fill gaps   bubble (p-1) / (3 v m + p-1)
    planned                  the order that ends first, from measured times      the same

Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2019 and 2021 (PipeDream-flush, interleaved), Lamy-Poirier 2022
(looped BFS), Qi et al. 2023 (zero bubble, there ZB-H1; and orders planned from measured times).
"""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name

from common.errors import PlanError
from parallel.strategies import suggest


@dataclass(frozen=True)
class Schedule:
    """What is particular about a schedule.

    class_name      module and name of what runs it
    looped          whether a rank runs several stages
    rounds          whether chunks go in rounds of as many as there are ranks
    splits_backward whether gradients of inputs and of weights are taken at different times, somewhere in a step
    refused         why it cannot be used, where it cannot
    """

    class_name: str
    looped: bool = False
    rounds: bool = False
    splits_backward: bool = False
    refused: str = ""


_V_SHAPED = (
    "torch 2.13's evaluation hangs under it (rank 0 runs the first stage and the last); "
    "parallel.schedule=interleaved_zero_bubble is a zero-bubble schedule that works"
)

_TORCH = "torch.distributed.pipelining.schedules"

SCHEDULES = {
    "gpipe": Schedule(f"{_TORCH}:ScheduleGPipe"),
    "1f1b": Schedule(f"{_TORCH}:Schedule1F1B"),
    "interleaved_1f1b": Schedule(f"{_TORCH}:ScheduleInterleaved1F1B", looped=True, rounds=True),
    "looped_bfs": Schedule(f"{_TORCH}:ScheduleLoopedBFS", looped=True),
    "interleaved_zero_bubble": Schedule(
        f"{_TORCH}:ScheduleInterleavedZeroBubble", looped=True, rounds=True, splits_backward=True
    ),
    "planned": Schedule("parallel.pipe_stage:PlannedSchedule", looped=True, splits_backward=True),
    "zbv_zero_bubble": Schedule(
        f"{_TORCH}:ScheduleZBVZeroBubble", looped=True, splits_backward=True, refused=_V_SHAPED
    ),
    "dualpipev": Schedule(f"{_TORCH}:ScheduleDualPipeV", looped=True, splits_backward=True, refused=_V_SHAPED),
}
NAMES = tuple(name for name, schedule in SCHEDULES.items() if not schedule.refused)


def stages_per_rank(schedule: str, wanted: int | None) -> int:
    """How many stages each rank runs: ``wanted``, or what the schedule needs where that is None."""
    looped = SCHEDULES[schedule].looped
    if wanted is None:
        return 2 if looped else 1
    if wanted < 1:
        raise PlanError(f"parallel.stages_per_rank={wanted} must be at least 1")
    if wanted > 1 and not looped:
        raise PlanError(
            f"parallel.schedule={schedule} runs one stage a rank, parallel.stages_per_rank={wanted} is too many; "
            "parallel.schedule=interleaved_1f1b takes several"
        )
    return wanted


def check_schedule(schedule: str, replicas: int) -> None:
    """Raise PlanError for a schedule that is not right, at all or with replicas."""
    if SCHEDULES[schedule].refused:
        raise PlanError(f"parallel.schedule={schedule} is refused: {SCHEDULES[schedule].refused}")
    if SCHEDULES[schedule].splits_backward and replicas > 1:
        raise PlanError(
            f"parallel.schedule={schedule} with parallel.dp={replicas} replicas is refused: torch skips the averaging "
            "of gradients there without a word (pytorch issue 144530); use parallel.schedule=interleaved_1f1b, or one "
            f"replica (parallel={suggest(replicas=False, stages=True)})"
        )


def check_chunks(schedule: str, chunks: int, ranks: int) -> None:
    """Raise PlanError where ``schedule`` cannot run ``chunks`` micro-batches on ``ranks`` ranks."""
    if schedule == "1f1b" and chunks < ranks:
        raise PlanError(
            f"parallel.schedule=1f1b needs at least as many chunks as stages: parallel.chunks={chunks} is below "
            f"parallel.pp={ranks}; set parallel.chunks={ranks} or more, or parallel.schedule=gpipe"
        )
    if SCHEDULES[schedule].rounds and not _equal_rounds(chunks, ranks):
        below, above = chunks - 1, chunks + 1
        while not _equal_rounds(below, ranks):
            below -= 1
        while not _equal_rounds(above, ranks):
            above += 1
        raise PlanError(
            f"parallel.schedule={schedule} runs chunks in rounds of parallel.pp={ranks}: parallel.chunks="
            f"{chunks} does not divide; the nearest that do are {below} and {above}"
        )


def _equal_rounds(chunks: int, ranks: int) -> bool:
    """Whether torch's interleaved schedules can cut ``chunks`` into their chunks // ranks (at least one) rounds."""
    return chunks % max(1, chunks // ranks) == 0


def ideal_bubble(schedule: str, ranks: int, chunks: int, per_rank: int) -> float:
    """Share of the ranks' time that a perfectly balanced run leaves idle, from 0 to 1."""
    work = per_rank * chunks * (3 if SCHEDULES[schedule].splits_backward else 1)
    return (ranks - 1) / (work + ranks - 1)


def in_flight(schedule: str, ranks: int, chunks: int, per_rank: int, rank: int) -> int:
    """At most how many micro-batches' activations a stage of ``rank`` holds at a time, on average over its stages."""
    if schedule in ("gpipe", "looped_bfs"):
        return chunks
    if schedule == "1f1b":
        return min(chunks, ranks - rank)
    if schedule == "planned":
        return -(-max_in_flight(ranks, chunks, per_rank, rank, spare=ranks) // per_rank)
    held = -(-_warm_up(ranks, per_rank, rank) // per_rank) + 1
    # Activations whose weight gradients wait are held on: never more than a round of them.
    if schedule == "interleaved_zero_bubble":
        held += ranks
    return min(chunks, held)


def max_in_flight(ranks: int, chunks: int, per_rank: int, rank: int, spare: int) -> int:
    """At most how many activations, one for each stage and micro-batch, a planned order has ``rank`` hold at a time:
    interleaved 1F1B's, and ``spare`` more."""
    return min(chunks * per_rank, _warm_up(ranks, per_rank, rank) + spare)


def _warm_up(ranks: int, per_rank: int, rank: int) -> int:
    """Forwards of interleaved 1F1B on ``rank`` before its first backward."""
    return (per_rank - 1) * ranks + 2 * (ranks - 1 - rank) + 1


def schedule_class(schedule: str) -> type:
    """The class that runs ``schedule``: torch's, or this project's that gives torch's another order."""
    return resolve_name(SCHEDULES[schedule].class_name)
