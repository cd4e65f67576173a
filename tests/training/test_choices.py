"""What is left to measurement: parallel.chunks=auto and parallel.balance=time, on the command line."""

import json

import pytest
from commandline import train

from training.autotune import candidates

pytestmark = pytest.mark.slow

COMMON = ["model=toy", "logger=none", "train.steps=4", "train.global_batch_size=4", "data.samples=40"]


def test_candidates_are_divisors_few_and_spread_out():
    assert candidates(12) == [1, 2, 3, 4, 6, 12]
    many = candidates(5040)
    assert len(many) == 10 and many[0] == 1 and many[-1] == 5040
    assert all(5040 % n == 0 for n in many) and many == sorted(many)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    overrides = ["parallel=pipelined", "parallel.chunks=auto", "parallel.balance=time"]
    return train([*COMMON, *overrides], tmp_path_factory.mktemp("choices") / "run")


def test_chunks_auto_prints_and_records_the_table_that_it_chose_from(chosen):
    assert chosen.code == 0, chosen.console
    table = json.loads((chosen.folder / "choices.json").read_text())
    assert {trial["chunks"] for trial in table["trials"]} <= {1, 2, 4}
    times = {trial["chunks"]: trial["step_time_s"] for trial in table["trials"]}
    assert table["chunks"] == min(times, key=times.get) == chosen.summary["chunks"]
    for chunks in times:
        assert f"chunks {chunks:>4} " in chosen.stdout
    assert f"parallel.chunks={table['chunks']} is the fastest" in chosen.stdout


def test_the_run_itself_is_as_if_the_numbers_had_been_given(chosen, tmp_path):
    stages = [len(stage["layers"]) for stage in chosen.summary["stages"]]
    numbers = [f"parallel.chunks={chosen.summary['chunks']}", f"parallel.balance={stages}".replace(" ", "")]
    given = train([*COMMON, "parallel=pipelined", *numbers], tmp_path / "given")
    assert given.losses == chosen.losses
    assert "of the time" in chosen.stdout and "of the time" not in given.stdout


def test_a_resumed_run_takes_the_numbers_of_its_checkpoint(chosen):
    again = ["parallel=pipelined", "parallel.chunks=auto", "parallel.balance=time", "train.resume=auto"]
    words = ["train.steps=6" if word == "train.steps=4" else word for word in COMMON]
    run = train([*words, *again], chosen.folder, tag="again")
    assert run.code == 0, run.console
    assert "a few steps with each" not in run.stdout and "of the time" not in run.stdout
    assert run.summary["chunks"] == json.loads((chosen.folder / "choices.json").read_text())["chunks"]
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4, 5, 6]


def test_chunks_auto_says_where_it_cannot_measure(tmp_path):
    run = train([*COMMON, "parallel.chunks=auto", "mode=plan"], tmp_path / "run")
    assert run.code == 1
    assert "error: parallel.chunks=auto starts trial runs" in run.stderr and "Traceback" not in run.stderr
