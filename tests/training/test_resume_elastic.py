"""A run whose worker dies goes on by itself from its newest checkpoint, to the same numbers."""

import pytest
from commandline import Started, train, wait_until
from composed import config, losses, run

from common.errors import TrainingError
from training.app import execute

RECIPE = [
    "model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "logger=none", "device=cpu",
    "parallel.threads=1", "train.global_batch_size=8", "train.precision=fp32", "train.eval_batches=1",
    "train.steps=60", "train.checkpoint_every=5", "optim.lr=1e-3",
]  # fmt: skip
START_S = 150


@pytest.fixture
def started(tmp_path, text):
    runs = []

    def begin(*overrides):
        runs.append(Started([*RECIPE, *text, *overrides], tmp_path / "run"))
        return runs[-1]

    yield begin
    for one in runs:
        one.kill()


def has_checkpoint(begun):
    def look():
        assert begun.process.poll() is None, begun.wait().console
        return any((begun.folder / "checkpoints").glob("step-*"))

    return look


def check(begun, rank, reference):
    wait_until(has_checkpoint(begun), START_S, "a checkpoint")
    begun.workers()[rank].kill()
    ended = begun.wait()
    assert ended.code == 0, ended.console
    assert f"rank {rank} was killed by signal 9 (SIGKILL)" in ended.stderr
    assert "restart 1 of 3 (launcher.max_restarts)" in ended.stderr
    assert "going on from" in ended.stdout
    assert [line["step"] for line in ended.steps] == list(range(1, 61))
    summary, losses = reference()
    assert ended.losses == losses
    keys = ("steps", "first_loss", "final_loss", "best_val_loss", "test_loss")
    assert {key: ended.summary[key] for key in keys} == {key: summary[key] for key in keys}


@pytest.mark.slow  # tests/faults has the kills of the default suite
def test_a_killed_process_restarts_the_run_which_ends_with_the_same_numbers(started, text, tmp_path):
    def reference():
        return run(tmp_path / "whole", *RECIPE, *text), losses(tmp_path / "whole")

    check(started("parallel=single", "launcher.max_restarts=3"), 0, reference)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_any_worker_of_a_pipeline_may_be_killed(started, text, tmp_path, rank):
    def reference():
        whole = train([*RECIPE, *text, "parallel=pipelined"], tmp_path / "whole")
        return whole.summary, whole.losses

    check(started("parallel=pipelined", "launcher.max_restarts=3"), rank, reference)


def test_an_error_that_would_come_again_is_not_tried_again(tmp_path):
    recipe = ["logger=none", "device=cpu", "launcher.max_restarts=3", "optim.lr=1e30", "train.max_skipped=2"]
    ended = train(recipe, tmp_path / "run")
    assert ended.code == 1
    assert "train.max_skipped=2" in ended.stderr
    assert "restart 1" not in ended.stderr


def test_fewer_than_no_restarts_are_refused(tmp_path):
    with pytest.raises(TrainingError, match="launcher.max_restarts=-1 must be at least 0"):
        execute(config("launcher.max_restarts=-1"), tmp_path, None)
