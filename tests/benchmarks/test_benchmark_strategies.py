"""What ranks hold and send under each strategy: measured at a toy size, and as the pages compute it."""

import re

import pytest
import torch.distributed as dist
from slow_cases import with_slow

from benchmarks import strategies
from benchmarks.strategies import STRATEGIES, TOY, Found
from benchmarks.trainer import configured
from parallel.schedules import SCHEDULES
from planner.memory import memory_of_ranks

# `pytest -m slow` has the others.
QUICK = ("fsdp parallel.reshard=false", "tensor")


def measured(words: list[str]) -> list:
    return strategies.measured(dist.get_rank() if dist.is_initialized() else 0, configured(words))


@pytest.mark.parametrize("name", with_slow([*STRATEGIES, QUICK[0]], STRATEGIES.keys() - QUICK))
def test_a_rank_holds_and_sends_what_the_formulas_say(name, ranks, tmp_path):
    name, *more = name.split()
    words = [*TOY, *STRATEGIES[name], *more]
    setup = configured(words)
    (found, *_) = ranks.run(setup.plan.processes, measured, words)
    found = [Found.parse(one) for one in found]
    assert len(found) == setup.plan.processes
    planned = memory_of_ranks(setup.plan, setup.work[0], states=1)
    for one, memory in zip(found, planned, strict=True):
        if setup.plan.sequence:
            assert one.activations == pytest.approx(memory.activations, rel=0.05)
        assert one.held == one.held_by_formula
        assert sum(one.sent.values()) == sum(one.sent_by_formula.values()), (one.sent, one.sent_by_formula)
        assert one.activations > 0 and (one.whole > 0) == setup.plan.info.sharded
        assert all(end >= start for step in one.steps for *_, start, end in step)
    strategies.picture(name, setup, found).savefig(tmp_path / f"{name}.png")


def test_the_orders_on_the_page_of_pipelines_are_those_that_the_planner_simulates():
    page = (strategies.PAGES / "pipelined.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#)", page, flags=re.DOTALL | re.MULTILINE))
    assert sections.keys() == SCHEDULES.keys()
    for schedule, section in sections.items():
        drawn = strategies.drawn(schedule, per_rank=2 if SCHEDULES[schedule].looped else 1)
        assert all(f"    {line}\n" in section for line in drawn.splitlines()), schedule
