"""How layers are dealt to stages."""

import itertools

import pytest

from common.errors import PlanError
from parallel.partition import block_partition, partition_layers

COSTS = dict.fromkeys("abcdefg", 1) | {"a": 9, "g": 9}


@pytest.mark.parametrize(
    "balance, stages, counts",
    [
        ("uniform", 3, [3, 2, 2]),
        ("uniform", 7, [1] * 7),
        ("size", 3, [1, 5, 1]),
        ("size", 7, [1] * 7),
        ([5, 2], 2, [5, 2]),
    ],
)
def test_layers_are_dealt_in_order_each_once(balance, stages, counts):
    runs = partition_layers(list(COSTS), stages, balance, list(COSTS.values()))
    assert [name for run in runs for name in run] == list(COSTS)
    assert [len(run) for run in runs] == counts


def test_more_stages_than_layers_are_refused_with_the_most_that_are_possible():
    with pytest.raises(
        PlanError, match=r"8 stages \(parallel.pp x stages_per_rank\) .* parallel.pp=7 or less; .* product is at most 7"
    ):
        partition_layers(list(COSTS), 8, "uniform", list(COSTS.values()))


@pytest.mark.parametrize("costs", [[5, 1, 1, 1, 8], [0, 0, 0, 7], [3, 0, 3, 0, 3, 0]], ids=str)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_no_other_cut_has_a_smaller_largest_block(costs, parts):
    def largest(lengths):
        ends = list(itertools.accumulate(lengths))
        return max(sum(costs[end - n : end]) for n, end in zip(lengths, ends, strict=True))

    everything = [c for c in itertools.product(range(1, len(costs) + 1), repeat=parts) if sum(c) == len(costs)]
    assert largest(block_partition(costs, parts)) == min(map(largest, everything))


@pytest.mark.parametrize("balance", [[7], [3, 3], [7, 0], [8, -1], [3.5, 3.5], [True, 6]], ids=str)
def test_a_list_that_does_not_fit_is_an_error_with_one_that_does(balance):
    with pytest.raises(PlanError, match=r"must be 2 whole numbers above 0 .*sum 7.*parallel\.balance=\[4,3\]"):
        partition_layers(list(COSTS), 2, balance, list(COSTS.values()))
