"""The training loop, in this process: what is skipped, clipped, evaluated, saved and written."""

import errno
import json
import math
import os

import pytest
import torch
from composed import change_batches, losses, records, run, saved, steps

from common.errors import CheckpointError, TrainingError
from data.batch import Batch
from training.checkpoint import save

SHORT = ["train.epochs=null", "train.steps=6"]
EVERY_STEP = ["train.checkpoint_every=1", "train.keep_checkpoints=100"]


@pytest.fixture
def poison(monkeypatch):
    """``poison(3, 4)``: the batches of steps 3 and 4 hold a NaN."""

    def poisoned(batch):
        inputs = batch.inputs.clone()
        inputs[0, 0] = math.nan
        return Batch(inputs, batch.targets)

    return lambda *bad: change_batches(monkeypatch, bad, poisoned)


def test_a_run_in_which_no_step_counted_has_failed(tmp_path, poison):
    poison(*range(1, 7))
    with pytest.raises(TrainingError, match="no step counted: the updates of all 6 steps were skipped, .* loss nan"):
        run(tmp_path, *SHORT)
    assert len(steps(tmp_path)) == 6 and not (tmp_path / "summary.json").exists()


def distance(folder, step):
    """By how far all weights together moved in ``step``, and the largest movement of one number."""
    before, after = saved(folder, step - 1), saved(folder, step)
    moves = torch.cat([(after[name] - before[name]).double().flatten() for name in after])
    return moves.norm().item(), moves.abs().max().item()


def test_a_step_that_is_not_finite_is_skipped_and_the_schedule_goes_on(tmp_path, poison):
    recipe = [*SHORT, *EVERY_STEP, "optim.momentum=0.9"]
    recipe += ["scheduler=step", "scheduler.unit=step", "scheduler.gamma=0.5"]
    poison(3)
    run(tmp_path, *recipe)
    lines = steps(tmp_path)
    assert [line["skipped"] for line in lines] == [False, False, True, False, False, False]
    assert (lines[2]["loss"], lines[2]["grad_norm"]) == (None, None)
    assert [line["lr"] for line in lines] == pytest.approx([0.05 * 0.5**n for n in range(6)])
    assert saved(tmp_path, 3) == {}, "a step that was skipped is no new checkpoint"
    before, after, momentum = saved(tmp_path, 2), saved(tmp_path, 4), saved(tmp_path, 4, "optimizer")
    for name in before:  # step 4 alone has moved them, by its learning rate times the momentum
        moved = before[name] - lines[3]["lr"] * momentum[f"{name}/momentum_buffer"]
        torch.testing.assert_close(after[name], moved)
    assert all(math.isfinite(line["loss"]) for line in lines[3:])


def test_too_many_such_steps_in_a_row_end_the_run_with_advice(tmp_path, poison):
    poison(2, 3, 4)
    with pytest.raises(TrainingError) as error:
        run(tmp_path, *SHORT, "train.max_skipped=2")
    said = str(error.value)
    assert "step 4" in said and "3 steps in a row (train.max_skipped=2)" in said
    assert all(way in said for way in ("optim.lr", "train.grad_clip", "train.precision=fp32", "debug=anomaly"))
    assert [line["step"] for line in steps(tmp_path)] == [1, 2, 3]
    assert not (tmp_path / "summary.json").exists()


def test_such_steps_that_are_not_in_a_row_do_not_add_up(tmp_path, poison):
    poison(1, 2, 4, 5)
    summary = run(tmp_path, *SHORT, "train.max_skipped=2")
    assert summary["steps"] == 6
    assert [line["skipped"] for line in steps(tmp_path)] == [True, True, False, True, True, False]


def test_the_summary_of_a_run_whose_first_step_was_skipped_is_json(tmp_path, poison):
    poison(1)
    run(tmp_path, *SHORT)
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert math.isfinite(summary["final_loss"])


def test_clipping_bounds_how_far_a_step_moves_the_weights(tmp_path):
    free, clipped = tmp_path / "free", tmp_path / "clipped"
    for folder, clip in ((free, "null"), (clipped, "0.01")):
        run(folder, *SHORT, *EVERY_STEP, f"train.grad_clip={clip}", "optim.lr=1.0")
    norms = [line["grad_norm"] for line in steps(clipped)]
    assert min(norms) > 0.1, "what is written down is the norm before clipping"
    for step in range(2, 7):
        assert distance(clipped, step)[0] == pytest.approx(0.01, rel=1e-3)
        assert distance(free, step)[0] == pytest.approx(steps(free)[step - 1]["grad_norm"], rel=1e-3)


def test_a_norm_below_the_clip_is_left_alone(tmp_path):
    for folder, clip in ((tmp_path / "free", "null"), (tmp_path / "clipped", "1e6")):
        run(folder, *SHORT, f"train.grad_clip={clip}")
    assert losses(tmp_path / "free") == losses(tmp_path / "clipped")


def test_clipping_by_value_bounds_every_number(tmp_path):
    run(tmp_path, *SHORT, *EVERY_STEP, "train.clip_value=0.001", "optim.lr=1.0")
    for step in range(2, 7):
        norm, largest = distance(tmp_path, step)
        assert largest == pytest.approx(0.001, rel=1e-3)
        assert norm > 0.005, "most numbers are at the bound: each was clamped, not all scaled"


def test_clipping_by_value_comes_before_clipping_by_norm(tmp_path):
    run(tmp_path, *SHORT, *EVERY_STEP, "train.clip_value=0.001", "train.grad_clip=0.005", "optim.lr=1.0")
    assert distance(tmp_path, 2)[0] == pytest.approx(0.005, rel=1e-3)
    run(tmp_path / "loose", *SHORT, *EVERY_STEP, "train.clip_value=0.001", "train.grad_clip=1.0", "optim.lr=1.0")
    assert distance(tmp_path / "loose", 2)[1] == pytest.approx(0.001, rel=1e-3)


@pytest.mark.parametrize("every, expected", [("2", [2, 4, 5]), ("5", [5]), ("7", [5]), ("0", [5]), ("null", [])])
def test_evaluations_and_checkpoints_come_as_often_as_asked_and_at_the_end(tmp_path, every, expected):
    rhythm = [f"train.eval_every={every}", f"train.checkpoint_every={every}", "train.keep_checkpoints=9"]
    summary = run(tmp_path, "train.epochs=null", "train.steps=5", *rhythm)
    assert [line["step"] for line in records(tmp_path) if "val_loss" in line] == expected
    assert sorted(path.name for path in tmp_path.glob("checkpoints/step-*")) == [f"step-{s:08d}" for s in expected]
    assert (summary["best_val_loss"] is None) == (expected == [])


def test_evaluating_does_not_change_what_is_trained(tmp_path):
    for folder, every in ((tmp_path / "often", "1"), (tmp_path / "never", "null")):
        run(folder, *SHORT, f"train.eval_every={every}")
    assert losses(tmp_path / "often") == losses(tmp_path / "never")


def test_the_best_evaluation_is_kept_and_is_not_always_the_last(tmp_path):
    summary = run(tmp_path, "train.epochs=null", "train.steps=3", "train.eval_every=1", "optim.lr=3.0")
    found = [line["val_loss"] for line in records(tmp_path) if "val_loss" in line]
    assert summary["best_val_loss"] == min(found)
    assert min(found) < found[-1], "a rate this high makes it worse: else this test shows nothing"


def test_an_evaluation_of_few_batches_sees_fewer_samples(tmp_path):
    for folder, batches in ((tmp_path / "all", "null"), (tmp_path / "one", "1"), (tmp_path / "many", "1000")):
        run(folder, *SHORT, f"train.eval_batches={batches}")
    every, one, many = (records(tmp_path / name)[-1]["val_loss"] for name in ("all", "one", "many"))
    assert one != every
    assert many == every


def test_a_run_takes_the_steps_that_its_recipe_says(tmp_path):
    summary = run(tmp_path, "data.samples=330", "train.epochs=0.5", "train.steps=9")
    assert summary["steps"] == len(steps(tmp_path)) == 3


def test_overfit_learns_one_batch_of_a_language_by_heart(tmp_path, text):
    model = ["model=gpt2", "model.size=tiny", "model.n_layer=2", *text, "train.global_batch_size=4"]
    run(tmp_path, *model, "debug=overfit", "train.steps=60", "optim.lr=3e-3", "train.precision=fp32")
    found = losses(tmp_path)
    assert found[0] > 10
    assert found[-1] < 2


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path, text, deterministic_again):
    recipe = ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.dropout=0.1", *text]
    recipe += ["train.global_batch_size=4", "train.steps=4", "train.deterministic=true", "train.eval_batches=2"]
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        run(tmp_path / name, *recipe, f"seed={seed}")
    one, again, other = (saved(tmp_path / name, 4) for name in ("one", "again", "other"))
    assert losses(tmp_path / "one") == losses(tmp_path / "again")
    assert losses(tmp_path / "one") != losses(tmp_path / "other")
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["embedding.wte.weight"], other["embedding.wte.weight"])


@pytest.mark.parametrize("broken", ["start", "log", "finish"])
def test_training_goes_on_where_wandb_breaks(tmp_path, monkeypatch, broken):
    import wandb

    def fail(*args, **kwargs):
        raise RuntimeError("wandb is broken")

    class Fragile:
        summary = {}
        log = fail if broken == "log" else lambda self, *args, **kwargs: None
        finish = fail if broken == "finish" else lambda self, *args, **kwargs: None

    monkeypatch.setattr(wandb, "init", fail if broken == "start" else lambda **kwargs: Fragile())
    summary = run(tmp_path, *SHORT, "logger=wandb")
    assert [line["step"] for line in steps(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert json.loads((tmp_path / "summary.json").read_text())["final_loss"] == summary["final_loss"]


@pytest.fixture
def full_disk(monkeypatch):
    """``full_disk(2)``: the second checkpoint finds no room."""

    def at(*bad):
        real, calls = save.write_file, []

        def write_file(*args):
            calls.append(args)
            if len(calls) in bad:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        monkeypatch.setattr(save, "write_file", write_file)

    return at


def test_a_checkpoint_on_the_way_that_cannot_be_written_is_a_warning(tmp_path, full_disk, capsys):
    full_disk(2)
    run(tmp_path, *SHORT, "train.checkpoint_every=2")
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["best", "latest", "step-00000002", "step-00000006"]
    said = capsys.readouterr().err
    assert "warning: the checkpoint of step 4 could not be written" in said
    assert "No space left on device" in said and "MiB are free" in said
    assert (tmp_path / "summary.json").exists()


def test_a_final_checkpoint_that_cannot_be_written_is_an_error_and_leaves_the_last_good_one(tmp_path, full_disk):
    full_disk(2)
    with pytest.raises(CheckpointError, match="step 6 could not be written.*No space left on device"):
        run(tmp_path, *SHORT, "train.checkpoint_every=3")
    assert os.readlink(tmp_path / "checkpoints" / "latest") == "step-00000003"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000003"]
    assert len(steps(tmp_path)) == 6, "what was trained is on record"
    assert not (tmp_path / "summary.json").exists()


def test_a_folder_that_cannot_be_made_is_an_error_too(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="checkpoints"):
        run(tmp_path, *SHORT)
