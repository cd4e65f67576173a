"""The registry of strategies is the only place that knows them by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.errors import PlanError
from parallel.strategies import STRATEGIES, names_where, strategy_class, strategy_info, suggest
from parallel.strategy import Strategy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_a_class_and_a_configuration_of_its_name(name):
    assert issubclass(strategy_class(name), Strategy)
    assert f"\nname: {name}\n" in (ROOT / "conf" / "parallel" / f"{name}.yaml").read_text()


def test_every_configuration_is_of_a_registered_strategy():
    assert {path.stem for path in (ROOT / "conf" / "parallel").glob("*.yaml")} == STRATEGIES.keys()


def test_an_unknown_strategy_is_an_error_that_names_the_known_and_the_file():
    with pytest.raises(PlanError, match="parallel=zero is not registered in parallel/strategies.py, which has single,"):
        strategy_info("zero")


@pytest.mark.parametrize(
    "replicas, stages, name",
    [(False, False, "single"), (True, False, "ddp"), (False, True, "pipelined"), (True, True, "pipe_ddp")],
)
def test_error_messages_suggest_the_strategy_that_has_what_is_asked_for(replicas, stages, name):
    assert suggest(replicas=replicas, stages=stages) == name


def test_strategies_are_listed_by_their_properties():
    assert names_where(several_devices=True) == ["model_parallel", "data_parallel"]


def test_no_other_file_compares_names():
    compared = re.compile(rf"(?:[=!]=|\bin) [\[({{]?[\"'](?:{'|'.join(STRATEGIES)})[\"']")
    rooms = ("parallel", "training", "models", "data", "common")
    lines = [
        f"{path.name}: {line}"
        for room in rooms
        for path in ROOT.glob(f"{room}/**/*.py")
        for line in path.read_text().splitlines()
    ]
    assert not [line for line in lines if compared.search(line)]
