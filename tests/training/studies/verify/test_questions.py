"""mode=verify asks what users bring besides layers; each broken object is named with the question and one way out."""

import pytest
from brought import BROUGHT
from slow_cases import with_slow

from launchers import World
from models.given import set_given
from training import load_config
from training.command.api import with_given
from training.run.prepare import prepare
from training.studies.verification import questions

WORDS = ("logger=none", "train.global_batch_size=8", "train.precision=fp64", "device=cpu", "parallel=single")
CASES = {brought.name: brought for brought in BROUGHT}
QUICK = {"right ones", "an attribute", "a callback", "a mean of means", "an export", "reads counted"}


@pytest.mark.parametrize("name", with_slow(CASES, {*CASES} - QUICK))
def test_what_is_broken_is_named_by_its_question(name, tmp_path, monkeypatch, capfd):
    brought = CASES[name]
    monkeypatch.setattr(questions, "call_in_workers", lambda asked, args, *_: [asked(World.alone(), *args)])
    objects = {"model": brought.chain(), "data": brought.data()}
    set_given(objects)
    try:
        cfg = with_given(load_config(*WORDS, *brought.typed), objects)
        found = [*questions.ask(cfg, prepare(cfg), tmp_path / "questions", lambda: brought.question != "data")]
    finally:
        set_given(None)
    wrong = [one for one in found if not one.holds]
    assert [one.probe for one in wrong] == [brought.question] * bool(brought.question), [*map(str, found)]
    assert all(brought.words in one.text for one in wrong), wrong
    assert len(found) == (1 if brought.question == "data" else 4)
