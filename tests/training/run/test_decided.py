"""What is typed does not change, and what is decided is decided once: a run's configuration and its plan."""

import json
from dataclasses import asdict
from unittest.mock import Mock

import pytest
from composed import config, records
from omegaconf.errors import ReadonlyConfigError

from conf.instantiate import to_dict, with_values
from launchers import World
from parallel.plan import Plan
from training.run import prepare as preparing
from training.run import setup as setups
from training.studies.short_run import run_on_rank

SHORT = ("train.steps=2", "train.epochs=null")


def test_a_configuration_cannot_be_changed_but_gives_another_one():
    cfg = config(*SHORT)
    for key in ("train", "model", "parallel"):
        with pytest.raises(ReadonlyConfigError):
            cfg[key].added = 1
    other = with_values(cfg, {"train.steps": 3, "model.lora.base": "${x}"})
    assert (cfg.train.steps, other.train.steps, other.model.lora.base) == (2, 3, "${x}")
    assert {**to_dict(cfg), "train": 0, "model": 0} == {**to_dict(other), "train": 0, "model": 0}


@pytest.mark.parametrize(
    "words",
    [["train.activation_checkpointing=true"], ["parallel=pipelined", "parallel.balance=size"], ["parallel=ddp"]],
)
def test_a_run_is_planned_and_examined_once_and_a_rank_runs_the_plan_that_it_gets(words, monkeypatch, tmp_path):
    made, examined = Mock(wraps=preparing.make_plan), Mock(wraps=setups.examine)
    monkeypatch.setattr(preparing, "make_plan", made)
    monkeypatch.setattr(setups, "examine", examined)
    setup = preparing.prepare(config(*SHORT, *words))
    assert made.call_count == examined.call_count == 1
    assert setup.plan.facts == dict.fromkeys(
        ["writes", "fills", "random", "draws", "passes", "auxiliary", "changes"], []
    )
    assert setup.plan.sample_dims == [[0]]
    if setup.plan.processes == 1:
        received = Plan.from_json(json.loads(json.dumps(asdict(setup.plan))))
        run_on_rank(World.alone(), preparing.PlannedRun(setup.cfg, received), tmp_path)
        assert [record["step"] for record in records(tmp_path) if "loss" in record] == [1, 2]
        assert made.call_count == examined.call_count == 1
