"""Random programs beside a loop in plain torch, in short; by the hundred: python -m benchmarks plain SEED COUNT."""

import math
import time

import pytest
import torch
from plain import loop
from plain.comparison import differences, first_bad, limits, outcome, sentence, shrunk
from plain.programs import Program, drawn
from slow_cases import slow

from benchmarks import plain

PROGRAM = Program({
    "blocks": ("residual", "BatchNorm1d", "begins in place"), "targets": ("ignored", "huber"), "factors": (1.0, 0.3),
    "rows": 22, "train.global_batch_size": 8, "parts": 4, "optim.momentum": 0.5, "optim.weight_decay": 0.1,
    "train.grad_clip": 0.1, "scheduler": "linear", "train.eval_every": 1,
})  # fmt: skip
COUNT, SEED = 25, 7


def means_of_all_targets(self, outputs, targets):
    """Wrong: ignored targets count."""
    losses, y = RIGHT(self, outputs, targets), loop.several(targets)[0]
    return losses | {"loss": losses["loss"] * (y != -100).double().mean()}


RIGHT = loop.Loop.losses


@pytest.mark.parametrize("wrong", [False, slow(True)])
def test_a_program_is_the_training_of_the_loop_and_a_fault_in_one_of_them_is_found(tmp_path, monkeypatch, wrong):
    if wrong:
        monkeypatch.setattr(loop.Loop, "losses", means_of_all_targets)
    found = outcome(PROGRAM, tmp_path / "run")
    assert (found.kind, found.words.startswith("single: loss of 1 is")) == (
        ("bad", True) if wrong else ("equal", False)
    )
    assert wrong or 0 < found.difference < 1e-13


def test_a_program_that_hangs_ends(monkeypatch):
    monkeypatch.setattr(plain, "LIMIT_S", 1)
    monkeypatch.setattr(loop.Loop, "train", lambda _: time.sleep(60))
    assert plain.ended(Program()) == ("hangs", "takes longer than 1 s", 0.0)


def test_the_first_difference_is_named():
    wanted = {(1, "loss"): 1.0, (1, "lr"): 0.1, (2, "loss"): 2.0, ("the end", "b0.weight"): torch.ones(2)}
    near = dict.fromkeys(wanted, 1e-9)

    def first(since=0, **changed):
        found = {**wanted, (1, "lr"): 0.2, (2, "loss"): math.nan} if not changed else changed["found"]
        return first_bad(found, wanted, differences(found, wanted, since), near)

    assert first() == "lr of 1 is 0.2, not 0.1 (1e+00, limit 1e-09)"
    assert first(since=1).startswith("loss of 2 is nan, not 2.0")
    assert first(found={}).startswith("loss of 1 is missing")
    assert first(found={**wanted, ("the end", "b0.weight"): torch.ones(1)}).startswith("b0.weight of the end differs")
    assert first(found=wanted) == ""


def test_limits_in_half_precision_are_those_of_each_number():
    program = Program({"train.precision": "bf16", "blocks": ("Linear",), "rows": 8})
    near = limits(program, loop.Loop(program).train(), 2)
    assert near[2, "lr"] == 1e-6 and 1e-3 < near["the end", "head.outs.0.weight"] < 0.1


def test_a_failing_program_is_made_as_simple_as_it_can_be():
    simple = shrunk(PROGRAM, lambda program: "huber" in program["targets"] and program["parts"] > 1, tries=1000)
    assert simple == Program({"targets": ("huber",), "parts": 4})


def test_refusals_that_differ_in_names_and_numbers_are_one():
    one, two = (
        f"layer 'b{i}' (Own): its forward calls the BatchNorm 'b{i}.a' {i} times, and so on. More" for i in (2, 3)
    )
    assert sentence(one) == sentence(two) == "its forward calls the BatchNorm … … times"


def test_programs_are_drawn_alike_and_of_every_kind():
    programs = [drawn(SEED, number) for number in range(150)]
    assert programs[7] == drawn(SEED, 7) and len({*map(repr, programs)}) == len(programs)
    assert len({p["layout"] for p in programs}) > 12 and {p["train.precision"] for p in programs} == {*loop.DTYPES}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(COUNT))
def test_random_programs_are_the_training_of_the_loop(tmp_path, number):
    program = drawn(SEED, number)
    found = outcome(program, tmp_path / "run")
    assert found.kind not in ("bad", "crash", "hangs"), f"{found.words}\n{program}"
