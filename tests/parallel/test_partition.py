"""How layers are dealt to stages."""

from __future__ import annotations

import itertools

import pytest

from common.errors import PlanError
from parallel.plan import block_partition, partition_layers

NAMES = list("abcdefg")
COSTS = [9, 1, 1, 1, 1, 1, 9]


@pytest.mark.parametrize("stages", range(1, 8))
@pytest.mark.parametrize("balance", ["uniform", "size"])
def test_every_layer_is_dealt_once_in_order_and_no_stage_is_empty(stages, balance):
    runs = partition_layers(NAMES, stages, balance, COSTS)
    assert [name for run in runs for name in run] == NAMES
    assert len(runs) == stages
    assert all(runs)


def test_uniform_deals_equally_many_and_the_first_stages_take_the_rest():
    assert partition_layers(NAMES, 3, "uniform", COSTS) == [["a", "b", "c"], ["d", "e"], ["f", "g"]]


def test_size_cuts_where_the_parameters_are():
    assert partition_layers(NAMES, 3, "size", COSTS) == [["a"], ["b", "c", "d", "e", "f"], ["g"]]


def test_a_list_gives_each_stage_its_number_of_layers():
    assert partition_layers(NAMES, 2, [5, 2], COSTS) == [["a", "b", "c", "d", "e"], ["f", "g"]]


@pytest.mark.parametrize("costs", [[5, 1, 1, 1, 8], [1, 2, 3, 4, 5, 6], [0, 0, 0, 7], [3, 0, 3, 0, 3, 0]], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_no_other_cut_has_a_smaller_largest_block(costs, parts):
    def largest(lengths):
        ends = list(itertools.accumulate(lengths))
        return max(sum(costs[end - n : end]) for n, end in zip(lengths, ends, strict=True))

    everything = [c for c in itertools.product(range(1, len(costs) + 1), repeat=parts) if sum(c) == len(costs)]
    assert largest(block_partition(costs, parts)) == min(map(largest, everything))


def test_more_stages_than_layers_is_an_error_that_names_both():
    with pytest.raises(PlanError, match=r"8 stages .* only 7 layers: a, b, .*; set parallel.pp=7 or less"):
        partition_layers(NAMES, 8, "uniform", COSTS)


@pytest.mark.parametrize("balance", [[7], [3, 3], [7, 0], [8, -1], [3.5, 3.5], [True, 6], [2, 2, 3]], ids=str)
def test_a_list_that_does_not_fit_is_an_error_with_one_that_does(balance):
    with pytest.raises(PlanError) as error:
        partition_layers(NAMES, 2, balance, COSTS)
    assert f"parallel.balance={balance}".replace(" ", "") in str(error.value).replace(" ", "")
    assert "must be 2 whole numbers above 0" in str(error.value)
    assert "sum 7" in str(error.value)
    assert "parallel.balance=[4,3]" in str(error.value)


def test_an_unknown_balance_is_an_error_with_the_known_ones():
    with pytest.raises(PlanError, match=r"parallel.balance=even is not known; choose uniform, time, size, .*\[4,3\]"):
        partition_layers(NAMES, 2, "even", COSTS)
