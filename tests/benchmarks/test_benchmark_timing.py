"""How contenders are timed: in turns, the warm-up left out, ratios round by round."""

import pytest

from benchmarks.timing import Spread, paired, take_turns


def test_contenders_take_turns_round_by_round():
    calls = []
    contenders = {name: lambda number, name=name: calls.append((name, number)) for name in "ab"}
    take_turns(contenders, rounds=2, warm_up=1)
    assert calls == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3)]


def test_the_warm_up_is_not_in_the_times():
    seconds = take_turns({"a": lambda number: None}, rounds=3, warm_up=2)
    assert len(seconds["a"]) == 3


def test_processes_meet_before_and_after_each_step():
    events = []
    take_turns({"a": lambda number: events.append("step")}, 1, warm_up=0, meet=lambda: events.append("meet"))
    assert events == ["meet", "step", "meet"]


def test_a_spread_is_the_median_and_both_ends():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, fastest=1.0, slowest=3.0)


def test_no_round_is_an_error():
    with pytest.raises(ValueError, match="at least one round"):
        Spread.of([])


def test_ratios_are_taken_within_a_round_where_noise_is_the_same():
    # The machine was ten times as slow in the second round, for both.
    assert paired({"fast": [1.0, 10.0, 1.0], "slow": [2.0, 20.0, 2.0]}, "fast", "slow") == 2.0
