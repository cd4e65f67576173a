"""What ranks that share sequences keep and send: measured at a toy size, and by the planner's formulas."""

import pytest
import torch.distributed as dist
from slow_cases import with_slow

from benchmarks import context
from benchmarks.trainer import configured
from planner.memory import memory_of_ranks


def runs_of(way: str) -> dict[str, list[str]]:
    one = [*context.TOY, "parallel=single"]
    return {context.ONE: one, way: [*context.TOY, "parallel=context", "parallel.cp=2", f"parallel.context={way}"]}


def measured(way: str) -> tuple:
    return context.side_by_side(dist.get_rank(), runs_of(way), 1)


@pytest.mark.parametrize("way", with_slow(context.WAYS, {"gather", "ring"}))
def test_a_rank_keeps_half_and_sends_what_the_formulas_say(way, ranks):
    (seconds, found), _ = ranks.run(2, measured, way)
    one, shared = (context.Found(*found[name]) for name in (context.ONE, way))
    assert all(len(times) == 1 and times[0] > 0 for times in seconds.values()) and one.sent == 0
    setup = configured(runs_of(way)[way])
    columns = context.sent_columns(setup, shared)
    assert columns["MiB that a layer sends"] == columns["by formula"] != "0.00"
    planned = memory_of_ranks(setup.plan, setup.work[0], states=2)[0]
    assert shared.activations == pytest.approx(planned.activations, rel=0.01)
    assert shared.activations <= 0.56 * one.activations
    assert shared.held["weights"] == one.held["weights"] == planned.weights
