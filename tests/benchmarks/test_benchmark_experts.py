"""What ranks that share experts hold, keep and send: measured at a toy size, and by the planner's formulas."""

import pytest
import torch.distributed as dist

from benchmarks import experts
from benchmarks.context import ONE, Found, sent_columns, side_by_side
from benchmarks.trainer import Trainer, configured
from planner.memory import memory_of_ranks

RUNS = {ONE: [*experts.TOY, "parallel=single"], "shared": [*experts.TOY, "parallel=expert", "parallel.ep=2"]}


def measured() -> tuple:
    return side_by_side(dist.get_rank(), RUNS, 1)


def test_a_rank_holds_keeps_and_sends_what_the_formulas_say(ranks):
    (seconds, found), _ = ranks.run(2, measured)
    one, shared = (Found(*found[name]) for name in RUNS)
    assert seconds.keys() == RUNS.keys() and one.sent == 0
    setup = configured(RUNS["shared"])
    planned = memory_of_ranks(setup.plan, setup.work[0], states=2)[0]
    assert shared.held["weights"] == shared.held["gradients"] == planned.weights < one.held["weights"]
    assert shared.held["optimizer"] == pytest.approx(planned.optimizer, rel=0.01)  # which also counts steps
    # more rows go to one of the two ranks than to the other
    sent, formula = map(float, sent_columns(setup, shared).values())
    assert sent == pytest.approx(formula, rel=0.3)
    assert shared.activations == pytest.approx(planned.activations, rel=0.2)


def test_mixtral_has_the_sizes_of_the_mixture():
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    trainer = Trainer(configured(RUNS[ONE]))
    sizes = [
        sum(p.numel() for p in each) for each in (experts.mixtral(trainer).parameters(), trainer.strategy.parameters())
    ]
    assert sizes[0] == sizes[1] == trainer.setup.plan.parameters
