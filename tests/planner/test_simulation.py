"""When a pipeline's work runs: in the order of real runs, and as long as the formula says."""

import random

import pytest
from cases import Layout, Recipe, train

from parallel.actions import UNMEASURED, StageSeconds
from parallel.schedules import SCHEDULES, ideal_bubble
from parallel.timeline import WORK, bubble_fraction, work_span
from planner.simulation import duration, makespan, simulate
from training.reporting.timeline import draw

TICK = StageSeconds(1, 2, 1, 1)
ALTERNATING = ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble"]
# Ranks, stages of each, micro-batches.
SIZES = [(2, 1, 2), (2, 2, 4), (2, 3, 16), (3, 2, 9), (4, 1, 4), (4, 2, 16), (4, 3, 8), (8, 1, 16), (8, 2, 8),
         (8, 3, 16), (8, 2, 64)]  # fmt: skip
PLANNED_SIZES = [(2, 1, 4), (2, 2, 8), (2, 3, 5), (3, 2, 6), (3, 1, 9), (4, 1, 8), (4, 2, 8)]
ROUGH_SIZES = [(3, 1, 3), (4, 2, 4), (8, 1, 8)]  # with as many micro-batches as ranks
OFF_BY = {"1f1b": 0.02, "interleaved_1f1b": 0.06, "interleaved_zero_bubble": 0.06, "planned": 0.06}


def scaled(factors) -> list[StageSeconds]:
    return [StageSeconds(*(factor * part for part in UNMEASURED)) for factor in factors]


def tables(stages: int) -> dict[str, list[StageSeconds]]:
    """The seconds of equal stages and of unequal ones."""
    drawn = random.Random(stages)
    return {
        "equal": scaled([1.0] * stages),
        "the ends take longer": scaled([1.3, *[1.0] * (stages - 2), 1.6]),
        "the first half has a layer more": scaled([1.25 if i < stages // 2 else 1.0 for i in range(stages)]),
        "any": scaled([drawn.uniform(0.6, 1.4) for _ in range(stages)]),
        "any, and any shares": [
            StageSeconds(*(part * drawn.uniform(0.7, 1.3) for part in UNMEASURED)) for _ in range(stages)
        ],
    }


def simulated(*case) -> float:
    return work_span([i for done in simulate(*case).values() for i in done])[1]


def worst(ranks: int, per_rank: int, chunks: int, schedule: str) -> float:
    """How much the formula is off at most, as a fraction of what is simulated."""
    off = [
        makespan(seconds, ranks, chunks, schedule) / simulated(seconds, ranks, chunks, schedule) - 1
        for seconds in tables(ranks * per_rank).values()
    ]
    return max(map(abs, off))


@pytest.mark.parametrize("ranks, per_rank, chunks", SIZES)
def test_of_all_forwards_and_then_all_backwards_the_formula_is_exact(ranks, per_rank, chunks):
    assert worst(ranks, 1, chunks, "gpipe") < 1e-9
    assert worst(ranks, per_rank, chunks, "looped_bfs") < 1e-9


@pytest.mark.parametrize(
    "schedule, ranks, per_rank, chunks",
    [(name, p, v, m) for name in ALTERNATING for p, v, m in SIZES if v == 1 or SCHEDULES[name].looped]
    + [("planned", *size) for size in PLANNED_SIZES + ROUGH_SIZES],
)
def test_the_formula_says_what_is_simulated_or_almost(schedule, ranks, per_rank, chunks):
    assert worst(ranks, per_rank, chunks, schedule) < (
        0.15 if chunks == ranks and schedule == "planned" else OFF_BY[schedule]
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize("ranks, chunks", [(1, 3), (2, 4), (4, 8)])
def test_equal_stages_are_idle_as_long_as_the_textbook_says(schedule, ranks, chunks):
    per_rank = 2 if SCHEDULES[schedule].looped else 1
    done = simulate([TICK] * (ranks * per_rank), ranks, chunks, schedule)
    ideal = ideal_bubble(schedule, ranks, chunks, per_rank)
    assert bubble_fraction([[intervals] for intervals in done.values()]) == pytest.approx(ideal)
    work = 3 * per_rank * chunks
    assert makespan([TICK] * (ranks * per_rank), ranks, chunks, schedule) == pytest.approx(work / (1 - ideal))


def test_the_formula_takes_thousands_of_micro_batches_and_each_adds_the_slowest_ranks_work():
    seconds = scaled([1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 1.0, 1.0])
    slowest = 3 * (1.2 + 1.3)  # of rank 1
    for schedule in ("interleaved_1f1b", "looped_bfs"):
        fewer, more = (makespan(seconds, 4, chunks, schedule) for chunks in (4000, 8000))
        assert more - fewer == pytest.approx(4000 * slowest, rel=0.001)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_works_in_the_order_of_a_real_run(ranks, schedule):
    layout = Layout("pipelined", pp=2, chunks=6, schedule=schedule)
    runs = ranks.run(2, train, layout, Recipe("classifier", global_batch=12, lr=0.1, steps=1))
    stages = 2 * (2 if SCHEDULES[schedule].looped else 1)
    done = simulate([UNMEASURED] * stages, 2, 6, schedule)
    for rank, run in enumerate(runs):
        (step,) = run.intervals
        assert [i[:3] for i in done[rank] if i.kind in WORK] == [i[:3] for i in step if i.kind in WORK]
        received = [{i[:3] for i in each if i.kind not in WORK} for each in (done[rank], step)]
        assert received[0] == received[1]


def test_what_is_simulated_can_be_drawn():
    done = simulate(scaled([1.0] * 4), 2, 4, "interleaved_zero_bubble")
    (axes,) = draw(done, "toy: interleaved_zero_bubble", "simulated").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stages 0, 2\n(rank 0)", "stages 1, 3\n(rank 1)"]


def test_a_small_pipeline_is_replayed_and_a_large_one_takes_the_formula():
    stages = scaled([1.0, 1.0, 1.0, 9.0])  # of which the formula makes too much
    assert duration(stages, 2, 4, "interleaved_1f1b") == simulated(stages, 2, 4, "interleaved_1f1b")
    assert duration(stages, 2, 64, "interleaved_1f1b") == makespan(stages, 2, 64, "interleaved_1f1b")
    assert duration(stages, 2, 4, "interleaved_1f1b") < makespan(stages, 2, 4, "interleaved_1f1b")
