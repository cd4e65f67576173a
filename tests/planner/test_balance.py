"""Stages of equal cost, where the cost of a layer is measured."""

import time
from itertools import combinations

import pytest
import torch
from cases import Layout, planned
from orders import span
from torch import nn

from data.dataset import Batch
from models.chain import Chain, LayerSpec
from models.losses import SquaredError
from parallel.actions import StageSeconds
from parallel.zero_bubble.order import best_order
from planner.balance import equal_stages, seconds_per_layer, stage_costs
from planner.memory import Rank
from planner.work import work_of


class Sleepy(nn.Linear):
    """A layer whose forward takes ``seconds``."""

    def __init__(self, seconds: float, width: int = 4) -> None:
        super().__init__(width, width)
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)


def chain_of(*layers) -> Chain:
    named = [LayerSpec(f"l{i}", build) for i, build in enumerate(layers)]
    return Chain(named, loss=SquaredError())


def plan_of(chain: Chain, batch: int = 4):
    return planned(Layout("pipelined", pp=2, chunks=2), chain, batch)


SAMPLE = Batch(torch.randn(2, 4), torch.randn(2, 4))


def test_a_layers_seconds_are_its_forward_and_backward():
    chain = chain_of(*(lambda s=s: Sleepy(s) for s in (0.03, 0.0, 0.01)))
    first, second, third = seconds_per_layer(plan_of(chain), chain, SAMPLE, seed=1, threads=1)
    assert 0.03 <= first < 0.06 and second < 0.01 and 0.01 <= third < 0.03


def test_measuring_leaves_random_numbers_as_they_were():
    chain = chain_of(lambda: nn.Linear(4, 4), lambda: nn.Dropout(0.5), lambda: nn.Linear(4, 4))
    torch.manual_seed(3)
    state = torch.default_generator.get_state()
    seconds_per_layer(plan_of(chain), chain, SAMPLE, seed=1, threads=1)
    assert torch.equal(torch.default_generator.get_state(), state)


def test_bytes_grow_with_parameters_and_with_activations():
    chain = chain_of(lambda: nn.Linear(4, 64), lambda: nn.Linear(64, 4), nn.Identity, lambda: nn.Linear(4, 4))
    costs = Rank.of_plan(plan_of(chain), work_of(chain, SAMPLE, "fp32")[0], states=1).each_layer()
    assert costs[0] >= 3 * 4 * (4 * 64 + 64)
    assert costs[1] > costs[3] > costs[2]
    more = Rank.of_plan(plan_of(chain, batch=128), work_of(chain, SAMPLE, "fp32")[0], states=1).each_layer()
    assert all(more[i] > costs[i] for i in (0, 1, 3)) and more[2] == costs[2] == 0.0


SPLITS = [
    ([1, 1, 1, 3], 2, [3, 1]),
    ([3, 1, 1, 1], 2, [1, 3]),
    ([1] * 6, 3, [2, 2, 2]),
    ([1, 9, 1], 3, [1, 1, 1]),
    # Another cut would be 1 % better.
    ([1.0, 1.0, 1.02, 0.99, 1.0, 1.01], 2, [3, 3]),
    ([1.01, 1.01, 1.01, 1.01, 1.0, 1.0, 1.0], 2, [4, 3]),
]


@pytest.mark.parametrize("costs, stages, counts", SPLITS)
def test_the_dearest_stage_costs_least_and_noise_does_not_move_layers(costs, stages, counts):
    assert equal_stages(costs, stages) == counts


def test_where_a_rank_runs_several_stages_the_dearest_rank_costs_least():
    # Cut into four equal blocks, the second rank would have the 2 twice.
    costs = [1, 1, 1, 2, 1, 1, 1, 2]
    assert equal_stages(costs, 4) == [2, 2, 2, 2]
    counts = equal_stages(costs, 4, ranks=2, chunks=8)
    each = [sum(costs[sum(counts[:i]) : sum(counts[: i + 1])]) for i in range(4)]
    assert each[0] + each[2] == each[1] + each[3] == 5


@pytest.mark.parametrize("seed", range(2))
def test_a_looped_split_is_as_good_as_any_but_for_what_noise_would_decide(seed):
    costs = torch.rand(12, generator=torch.Generator().manual_seed(seed)).tolist()

    def step(counts):
        each = stage_costs(costs, counts)
        return 8 * max(each[0] + each[2], each[1] + each[3]) + max(each)

    cuts = combinations(range(1, 12), 3)
    best = min(step([b - a for a, b in zip((0, *cut), (*cut, 12), strict=True)]) for cut in cuts)
    assert step(equal_stages(costs, 4, ranks=2, chunks=8)) <= 1.03 * best


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", pytest.param("planned", marks=pytest.mark.slow)])
def test_a_split_of_more_layers_than_every_split_is_tried_for_is_found_soon_and_is_nearly_even(schedule):
    costs = torch.rand(60, generator=torch.Generator().manual_seed(1)).tolist()
    started = time.perf_counter()
    each = stage_costs(costs, equal_stages(costs, 8, ranks=2, chunks=8, schedule=schedule))
    assert time.perf_counter() - started < 60
    assert max(sum(each[0::2]), sum(each[1::2])) <= 1.02 * sum(costs) / 2


@pytest.mark.parametrize("seed", range(2))
def test_stages_of_a_planned_pipeline_are_cut_for_its_order(seed):
    """Whose end is reckoned in orders that were planned for the true times, by another sum than the one that chose."""
    costs = torch.rand(14, generator=torch.Generator().manual_seed(seed)).tolist()

    def end(schedule: str | None) -> float:
        each = stage_costs(costs, equal_stages(costs, 4, ranks=2, chunks=4, schedule=schedule))
        seconds = [StageSeconds(cost / 3, cost * 2 / 3, cost / 3, cost * 0.36) for cost in each]
        return span(best_order(seconds, 2, 4), seconds)

    assert end("planned") <= 1.01 * end(None)
    assert end("planned") <= 1.10 * (4 * sum(costs) / 2)
