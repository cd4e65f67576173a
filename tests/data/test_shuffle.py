"""The keyed bijection that stands for a shuffled list."""

import numpy as np
import pytest

from data.loader import permute


@pytest.mark.parametrize("n", [1, 2, 17, 1000, 65537])
def test_every_number_comes_out_exactly_once(n):
    assert sorted(permute(np.arange(n), n, key=(1337, 0))) == list(range(n))


def test_the_order_is_this_one_on_every_machine():
    assert permute(np.arange(10), 10, key=(1337, 0)).tolist() == [5, 3, 7, 8, 4, 2, 6, 1, 0, 9]


def test_keys_give_orders_that_have_nothing_to_do_with_each_other():
    n = 10_000
    orders = [permute(np.arange(n), n, key) for key in [(0, 0), (0, 1), (1, 0), (-1, 0)]]
    for i, one in enumerate(orders):
        assert abs(np.corrcoef(one, np.arange(n))[0, 1]) < 0.05
        for other in orders[:i]:
            assert (one == other).sum() < 20


def test_two_hundred_million_samples_need_no_list():
    few = permute(np.arange(1000), 200_000_000, key=(1, 2))
    assert len(set(few.tolist())) == 1000 and few.max() < 200_000_000
