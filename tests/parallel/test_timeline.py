"""How idle a pipeline was, from when its work ran."""

import pytest

from parallel.timeline import KEPT_STEPS, WORK, Interval, Recording, Timeline, bubble_fraction, now, on_one_clock


def work(start: float, end: float) -> Interval:
    return Interval("forward", 0, 0, start, end)


KINDS = [*WORK, "receive_activation", "receive_gradient"]
BUSY, IDLE = [work(0, 1)], [work(0, 1), work(9, 10)]
BUBBLES = {
    "ranks that always work": ([[[work(0, 2)]], [[work(0, 1), work(1, 2)]]], 0.0),
    "ranks that take turns": ([[[work(10, 11)]], [[work(11, 12)]]], 0.5),
    # 4 of 2 x 3 seconds and 2 of 2 x 2 are busy; what lies between steps does not count.
    "two steps": ([[[work(0, 2)], [work(100, 101)]], [[work(1, 3)], [work(101, 102)]]], 1 - 6 / 10),
    "a warm-up of two steps": ([[IDLE, IDLE, BUSY]], 0.0),
    "no more than the warm-up": ([[IDLE, IDLE]], 0.8),
    "steps that not all ranks have": ([[IDLE, IDLE, IDLE, BUSY], [IDLE, IDLE, BUSY]], 0.0),
    "receives are no work": (
        [[[*(Interval(kind, 0, 0, at, at + 1) for at, kind in enumerate(KINDS)), work(7, 8)]]], 3 / 8
    ),
    "receives are not in the span": (
        [[[Interval(KINDS[-2], 0, 0, -5, 0), work(0, 2), Interval(KINDS[-1], 0, 0, 2, 9)]]], 0.0
    ),
    "no step of all ranks": ([[], [[work(0, 1)]]], None),
    "no work": ([[[]], [[]]], None),
}  # fmt: skip


@pytest.mark.parametrize("ranks, fraction", BUBBLES.values(), ids=BUBBLES)
def test_the_bubble_is_what_is_idle_of_the_span_from_the_first_work_to_the_last(ranks, fraction):
    assert bubble_fraction(ranks) == (None if fraction is None else pytest.approx(fraction))


def test_only_the_newest_steps_are_kept():
    timeline = Timeline()
    for step in range(KEPT_STEPS + 3):
        timeline.start_step()
        timeline.note("forward", 0, step, now())
        timeline.end_step()
    assert len(timeline.steps) == KEPT_STEPS
    assert timeline.steps[-1][0].microbatch == KEPT_STEPS + 2


def test_the_ranks_of_a_host_share_its_clock_and_other_hosts_are_moved_by_their_mark():
    """Host b's clock is 1000 seconds ahead of host a's; rank 1 left the barrier late, and that moves nothing."""
    recordings = [
        Recording("a", 50.0, [[work(10, 11)]]),
        Recording("a", 50.3, [[work(11, 12)]]),
        Recording("b", 1050.2, [[work(1013, 1014)]]),
        Recording("b", 1050.0, [[work(1012, 1013)]]),
    ]
    ranks = on_one_clock(recordings)
    assert [(i.start, i.end) for ((i,),) in ranks] == [(10, 11), (11, 12), (13, 14), (12, 13)]
