"""How contenders are timed: in turns, the warm-up left out, ratios round by round."""

import pytest

from benchmarks.timing import Spread, paired, take_turns


def test_contenders_take_turns_round_by_round_and_the_warm_up_is_not_in_the_times():
    calls = []
    contenders = {name: lambda number, name=name: calls.append((name, number)) for name in "ab"}
    seconds = take_turns(contenders, rounds=2, warm_up=1)
    assert calls == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3)]
    assert [len(times) for times in seconds.values()] == [2, 2]


def test_processes_meet_before_and_after_each_step():
    events = []
    take_turns({"a": lambda number: events.append("step")}, 1, 0, barrier=lambda: events.append("barrier"))
    assert events == ["barrier", "step", "barrier"]


def test_a_spread_is_the_median_and_both_ends_and_needs_a_round():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, fastest=1.0, slowest=3.0)
    with pytest.raises(ValueError, match="at least one round"):
        Spread.of([])


def test_ratios_are_taken_within_a_round_where_noise_is_the_same():
    # The machine was ten times as slow in the second round, for both.
    assert paired({"fast": [1.0, 10.0, 1.0], "slow": [2.0, 20.0, 2.0]}, "fast", "slow") == 2.0
