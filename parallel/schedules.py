"""Pipeline schedules: their names, what each asks of the chunk count, and the bubble of an ideal run.

p ranks, m chunks (micro-batches), v stages a rank; forwards and backwards of all stages alike:

    gpipe              all forwards, then all backwards                  bubble (p-1) / (m + p-1)
    1f1b               as gpipe, but a backward as soon as there is one:  the same, in less memory
    interleaved_1f1b   several stages a rank, dealt round robin          bubble (p-1) / (v m + p-1)

Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2019 and 2021 (PipeDream-flush, interleaved).
"""

from __future__ import annotations

from parallel.errors import PlanError

NAMES = ("gpipe", "1f1b", "interleaved_1f1b")


def stages_per_rank(schedule: str, wanted: int | None) -> int:
    """How many stages each rank runs: ``wanted``, or what the schedule needs where that is None."""
    looped = schedule == "interleaved_1f1b"
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


def check_chunks(schedule: str, chunks: int, ranks: int) -> None:
    """Raise PlanError where ``schedule`` cannot run ``chunks`` micro-batches on ``ranks`` ranks."""
    if schedule == "1f1b" and chunks < ranks:
        raise PlanError(
            f"parallel.schedule=1f1b needs at least as many chunks as stages: parallel.chunks={chunks} is below "
            f"parallel.pp={ranks}; set parallel.chunks={ranks} or more, or parallel.schedule=gpipe"
        )
    if schedule == "interleaved_1f1b":
        if not _equal_rounds(chunks, ranks):
            below, above = chunks - 1, chunks + 1
            while not _equal_rounds(below, ranks):
                below -= 1
            while not _equal_rounds(above, ranks):
                above += 1
            raise PlanError(
                f"parallel.schedule=interleaved_1f1b runs chunks in rounds of parallel.pp={ranks}: parallel.chunks="
                f"{chunks} does not divide; the nearest that do are {below} and {above}"
            )


def _equal_rounds(chunks: int, ranks: int) -> bool:
    """Whether torch's interleaved schedule can cut ``chunks`` into its chunks // ranks (at least one) rounds."""
    return chunks % max(1, chunks // ranks) == 0


def ideal_bubble(schedule: str, ranks: int, chunks: int, per_rank: int) -> float:
    """Share of the ranks' time that a perfectly balanced run leaves idle, from 0 to 1."""
    work = per_rank * chunks if schedule == "interleaved_1f1b" else chunks
    return (ranks - 1) / (work + ranks - 1)


def in_flight(schedule: str, ranks: int, chunks: int, per_rank: int, rank: int) -> int:
    """At most how many micro-batches' activations one stage of ``rank`` holds at a time."""
    if schedule == "gpipe":
        return chunks
    if schedule == "1f1b":
        return min(chunks, ranks - rank)
    warm_up = (per_rank - 1) * ranks + 2 * (ranks - 1 - rank) + 1
    return min(chunks, -(-warm_up // per_rank) + 1)


def schedule_class(schedule: str) -> type:
    """The class of torch.distributed.pipelining that runs ``schedule``."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    classes = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)
    return dict(zip(NAMES, classes, strict=True))[schedule]
