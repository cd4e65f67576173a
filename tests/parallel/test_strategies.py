"""The registry of strategies is the only place that knows them by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.errors import PlanError
from conf.composition import compose
from parallel.strategies import STRATEGIES, strategy_class, strategy_info
from parallel.strategy import Strategy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_a_class_and_a_configuration_of_its_name(name):
    assert issubclass(strategy_class(name), Strategy)
    assert f"\nname: {name}\n" in (ROOT / "conf" / "parallel" / f"{name}.yaml").read_text()


def test_every_configuration_is_of_a_registered_strategy():
    options = [path.stem for path in (ROOT / "conf" / "parallel").glob("*.yaml")]
    assert {compose([f"parallel={option}"]).parallel.name for option in options} == STRATEGIES.keys()


def test_an_unknown_strategy_is_an_error_that_names_the_known_and_the_file():
    with pytest.raises(PlanError, match="parallel=zero is not registered in parallel/strategies.py, .* single,"):
        strategy_info("zero")


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
