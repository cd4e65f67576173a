"""Pipeline schedules: their names, the numbers of chunks that they support, and the bubble of an ideal run.

p ranks, m chunks (micro-batches), v stages per rank. A backward takes the time of two forwards, half of it for the
gradients of inputs and half for the gradients of weights:

    gpipe                    all forwards, then all backwards                      bubble (p-1) / (m + p-1)
    1f1b                     each backward as soon as it is possible               the same, in less memory
    interleaved_1f1b         1f1b with several stages per rank, every p-th one     bubble (p-1) / (v m + p-1)
    looped_bfs               gpipe with several stages per rank                    bubble (p-1) / (v m + p-1)
    interleaved_zero_bubble  interleaved_1f1b; weight gradients fill its gaps      bubble (p-1) / (3 v m + p-1)
    planned                  the shortest simulated makespan, from measured times  the same

Three ranks (p) and four micro-batches (m), drawn as if a backward took as long as a forward. F2 is the forward of the
micro-batch with index 2, and B2 is its backward. Rank 0 holds the activations of four micro-batches under gpipe and of
three (p) under 1f1b. Rank 2 holds the activations of four micro-batches under gpipe and of one under 1f1b:

    gpipe    rank 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3         1f1b     rank 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
             rank 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .                   rank 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
             rank 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .                   rank 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2019 and 2021 (PipeDream-flush, interleaved), Lamy-Poirier 2022
(looped BFS), Qi et al. 2023 (zero bubble, there ZB-H1; and orders planned from measured times).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import count

from common.errors import PlanError


@dataclass(frozen=True)
class Schedule:
    """The properties of a schedule.

    Attributes:
        class_name: The module and name of the class that runs it.
        stage_class: The module and name of the class of its stages.
        looped: Whether a rank runs several stages.
        rounds: Whether chunks are run in rounds; a round has as many chunks as there are ranks.
        splits_backward: Whether gradients of inputs and of weights are computed at different times.
    """

    class_name: str
    stage_class: str = "parallel.pipe_stage:PipeStage"
    looped: bool = False
    rounds: bool = False
    splits_backward: bool = False


_TORCH = "torch.distributed.pipelining.schedules"
_SPLIT = "parallel.zero_bubble.schedule:SplitStage"

SCHEDULES = {
    "gpipe": Schedule(f"{_TORCH}:ScheduleGPipe"),
    "1f1b": Schedule(f"{_TORCH}:Schedule1F1B"),
    "interleaved_1f1b": Schedule(f"{_TORCH}:ScheduleInterleaved1F1B", looped=True, rounds=True),
    "looped_bfs": Schedule(f"{_TORCH}:ScheduleLoopedBFS", looped=True),
    "interleaved_zero_bubble": Schedule(
        f"{_TORCH}:ScheduleInterleavedZeroBubble", _SPLIT, looped=True, rounds=True, splits_backward=True
    ),
    "planned": Schedule("parallel.zero_bubble.schedule:PlannedSchedule", _SPLIT, looped=True, splits_backward=True),
}


def borders(stages: int) -> list[int]:
    """Return the number of neighbors of each stage: one for the first and the last stage, two for all other stages."""
    return [(stage > 0) + (stage < stages - 1) for stage in range(stages)]


def has_equal_rounds(schedule: str, ranks: int, chunks: int) -> bool:
    """Return whether a schedule supports this number of chunks: without rounds, or in chunks // ranks equal ones."""
    return not SCHEDULES[schedule].rounds or chunks % max(1, chunks // ranks) == 0


def check_schedule(schedule: str, ranks: int, per_rank: int, chunks: int) -> None:
    """Raise PlanError, with the nearest possible numbers, if a schedule cannot run so many stages and micro-batches."""
    if per_rank > 1 and not SCHEDULES[schedule].looped:
        raise PlanError(
            f"parallel.schedule={schedule} runs one stage per rank, but parallel.stages_per_rank={per_rank}; "
            "parallel.schedule=interleaved_1f1b runs several"
        )
    if schedule == "1f1b" and chunks < ranks:
        raise PlanError(
            f"parallel.schedule=1f1b needs at least as many chunks as stages: parallel.chunks={chunks} is below "
            f"parallel.pp={ranks}; set parallel.chunks={ranks} or more, or parallel.schedule=gpipe"
        )
    fits = partial(has_equal_rounds, schedule, ranks)
    if not fits(chunks):
        below, above = next(filter(fits, range(chunks, 0, -1))), next(filter(fits, count(chunks)))
        raise PlanError(
            f"parallel.schedule={schedule} runs chunks in rounds of parallel.pp={ranks}: parallel.chunks="
            f"{chunks} does not divide into equal rounds; the nearest that do are {below} and {above}"
        )


def ideal_bubble(schedule: str, ranks: int, chunks: int, per_rank: int) -> float:
    """Compute the fraction (0 to 1) of the ranks' time that is idle in a perfectly balanced run."""
    work = per_rank * chunks * (3 if SCHEDULES[schedule].splits_backward else 1)
    return (ranks - 1) / (work + ranks - 1)


def in_flight(schedule: str, ranks: int, chunks: int, per_rank: int, rank: int) -> int:
    """Compute how many micro-batches' activations a stage holds at most, averaged over the rank's stages."""
    if schedule in ("gpipe", "looped_bfs"):
        return chunks
    if schedule == "1f1b":
        return min(chunks, ranks - rank)
    if schedule == "planned":
        return -(-max_in_flight(ranks, chunks, per_rank, rank, spare=ranks) // per_rank)
    held = -(-_warm_up(ranks, per_rank, rank) // per_rank) + 1
    # Activations are also held until the gradients of the weights are computed: for at most one round of micro-batches.
    if schedule == "interleaved_zero_bubble":
        held += ranks
    return min(chunks, held)


def max_in_flight(ranks: int, chunks: int, per_rank: int, rank: int, spare: int) -> int:
    """Return the number of activations that a planned order lets a rank hold: ``spare`` more than interleaved 1F1B."""
    return min(chunks * per_rank, _warm_up(ranks, per_rank, rank) + spare)


def _warm_up(ranks: int, per_rank: int, rank: int) -> int:
    """Return the number of forwards on ``rank`` before its first backward, in interleaved 1F1B."""
    return (per_rank - 1) * ranks + 2 * (ranks - 1 - rank) + 1
