"""How idle a pipeline was, from when its work ran."""

from __future__ import annotations

import pytest
from cases import Layout, Recipe

from parallel.timeline import KEPT_STEPS, Interval, Timeline, bubble_fraction, now


def work(start: float, end: float) -> Interval:
    return Interval("forward", 0, 0, start, end)


def test_ranks_that_always_work_have_no_bubble():
    assert bubble_fraction([[[work(0, 2)]], [[work(0, 1), work(1, 2)]]]) == 0.0


def test_two_ranks_that_take_turns_idle_half_of_the_time():
    assert bubble_fraction([[[work(10, 11)]], [[work(11, 12)]]]) == 0.5


def test_the_span_is_that_of_the_whole_pipeline_and_steps_add_up():
    """Step one: 4 of 2 x 3 seconds busy; step two: 2 of 2 x 2. What lies between steps does not count."""
    first, second = [[work(0, 2)], [work(100, 101)]], [[work(1, 3)], [work(101, 102)]]
    assert bubble_fraction([first, second]) == pytest.approx(1 - 6 / 10)


def test_the_first_two_steps_are_warm_up_where_there_are_more():
    busy, idle = [work(0, 1)], [work(0, 1), work(9, 10)]
    assert bubble_fraction([[idle, idle, busy]]) == 0.0
    assert bubble_fraction([[idle, idle]]) == pytest.approx(0.8)


def test_without_a_measured_step_there_is_no_fraction():
    assert bubble_fraction([[], [[work(0, 1)]]]) is None
    assert bubble_fraction([[[]], [[]]]) is None


def test_only_work_within_a_training_step_is_noted():
    timeline = Timeline()
    timeline.note("forward", 0, 0, now())
    timeline.start_step()
    timeline.note("backward", 1, 2, now())
    timeline.end_step()
    timeline.note("forward", 0, 0, now())
    (step,) = timeline.steps
    assert [(i.kind, i.stage, i.microbatch) for i in step] == [("backward", 1, 2)]


def test_only_the_newest_steps_are_kept():
    timeline = Timeline()
    for step in range(KEPT_STEPS + 3):
        timeline.start_step()
        timeline.note("forward", 0, step, now())
        timeline.end_step()
    assert len(timeline.steps) == KEPT_STEPS
    assert timeline.steps[-1][0].microbatch == KEPT_STEPS + 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_a_pipelined_run_notes_every_forward_and_backward_and_idles_part_of_the_time(trained, schedule):
    layout = Layout("pipelined", pp=2, chunks=4, schedule=schedule)
    run = trained(layout, Recipe("gpt2", global_batch=8, lr=0.1, steps=4, eval_every=2))
    stages = 4 if schedule == "interleaved_1f1b" else 2
    for step in range(4):
        noted = [(i.kind, i.stage, i.microbatch) for result in run for i in result.intervals[step]]
        assert sorted(noted) == sorted(
            (kind, s, m) for kind in ("forward", "backward") for s in range(stages) for m in range(4)
        )
        for result in run:
            ends = [(i.start, i.end) for i in result.intervals[step]]
            assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:], strict=False))
    assert 0.0 < bubble_fraction([result.intervals for result in run]) < 1.0
