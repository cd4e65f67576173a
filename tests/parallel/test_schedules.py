"""Ideal bubbles, and what each schedule asks of the number of chunks."""

from __future__ import annotations

import pytest

from parallel.schedules import (
    SCHEDULES,
    ideal_bubble,
    in_flight,
    stages_per_rank,
)


@pytest.mark.parametrize(
    "schedule, ranks, chunks, per_rank, bubble",
    [
        ("gpipe", 2, 4, 1, 1 / 5),
        ("gpipe", 4, 4, 1, 3 / 7),
        ("gpipe", 2, 1, 1, 1 / 2),
        ("1f1b", 2, 4, 1, 1 / 5),
        ("1f1b", 4, 8, 1, 3 / 11),
        ("interleaved_1f1b", 2, 4, 2, 0.111),
        ("interleaved_1f1b", 4, 8, 2, 3 / 19),
        ("looped_bfs", 2, 4, 2, 1 / 9),
        ("interleaved_zero_bubble", 2, 4, 2, 0.04),
        ("planned", 2, 4, 2, 0.04),
        ("gpipe", 1, 4, 1, 0.0),
    ],
)
def test_ideal_bubbles(schedule, ranks, chunks, per_rank, bubble):
    assert ideal_bubble(schedule, ranks, chunks, per_rank) == pytest.approx(bubble, abs=2e-4)


def test_1f1b_holds_fewer_micro_batches_than_gpipe_and_fewest_at_the_end():
    assert [in_flight("gpipe", 4, 8, 1, rank) for rank in range(4)] == [8, 8, 8, 8]
    assert [in_flight("1f1b", 4, 8, 1, rank) for rank in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize("chunks", [2, 4, 8, 3])
def test_no_schedule_holds_more_micro_batches_than_there_are(chunks):
    for schedule in SCHEDULES:
        per_rank = stages_per_rank(schedule, None)
        assert all(1 <= in_flight(schedule, 2, chunks, per_rank, rank) <= chunks for rank in range(2))


def test_stages_a_rank():
    assert [stages_per_rank(name, None) for name in SCHEDULES] == [1, 1, 2, 2, 2, 2]
    assert stages_per_rank("interleaved_1f1b", 3) == 3


def test_the_configuration_knows_the_same_names():
    from conf.schema import Schedule

    assert [schedule.value for schedule in Schedule] == [*SCHEDULES]
