"""Resuming what is damaged: it is named, and the newest whole checkpoint is taken in its place."""

import json
import os
import shutil

import pytest
import torch
from commandline import train
from composed import losses, records, run, steps
from safetensors.torch import load_file, save_file

from common.errors import CheckpointError, TrainingError, UserError
from training.checkpoint.files import Checkpoint, is_usable, sha256, with_checksum
from training.loop import Loop
from training.optimizer import Optimizer

RECIPE = ["train.epochs=null", "train.steps=6", "optim.momentum=0.9", "train.checkpoint_every=2"]


def truncate(folder):
    path = folder / "model-00.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    return path


def zero(folder):
    path = folder / "model-00.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    return path


def flip_a_bit(folder):
    path = folder / "optimizer-00.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def delete_a_file(folder):
    path = folder / "optimizer-00.safetensors"
    path.unlink()
    return path


def break_the_manifest(folder):
    path = folder / "manifest.json"
    os.truncate(path, path.stat().st_size // 2)
    return path


def change_the_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 6', '"step": 4'))
    return path


def delete_the_manifest(folder):
    (folder / "manifest.json").unlink()
    return folder


DAMAGES = [
    truncate, zero, flip_a_bit, delete_a_file, break_the_manifest, change_the_manifest, delete_the_manifest
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six steps with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, *RECIPE)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    """The same, as if it had been killed after step 6; to be damaged."""
    folder = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    (folder / "summary.json").unlink()
    return folder


def step(folder, number):
    return folder / "checkpoints" / f"step-{number:08d}"


def test_whatever_is_damaged_the_newest_whole_one_is_found_and_the_damaged_one_named(whole, tmp_path):
    for damage in DAMAGES:
        folder = shutil.copytree(whole / "checkpoints", tmp_path / damage.__name__, symlinks=True)
        path, said = damage(folder / "step-00000006"), []
        assert Checkpoint.newest(folder, verify=True, warn=said.append).step == 4, damage
        assert len(said) == 1 and str(path) in said[0]


def test_auto_goes_back_as_far_as_it_must(copy, whole, capsys):
    paths = truncate(step(copy, 6)), flip_a_bit(step(copy, 4))
    run(copy, *RECIPE, "train.resume=auto")
    said = capsys.readouterr()
    warnings = [line for line in said.err.splitlines() if "it is not used" in line]
    assert len(warnings) == 2 and all(w.startswith("warning: ") for w in warnings)
    assert all(str(path) in warning for path, warning in zip(paths, warnings, strict=True))
    assert f"going on from {step(copy, 2)}" in said.out
    assert [line["step"] for line in records(copy) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert losses(copy) == losses(whole)
    assert os.readlink(copy / "checkpoints" / "latest") == "step-00000006"


def test_auto_starts_anew_where_none_is_whole(copy, whole, capsys):
    for number in (2, 4, 6):
        zero(step(copy, number))
    run(copy, *RECIPE, "train.resume=auto")
    assert "this run starts at step 1" in capsys.readouterr().out
    assert [line["step"] for line in records(copy) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert losses(copy) == losses(whole)


def test_a_damaged_one_that_was_asked_for_is_an_error_that_names_a_whole_one(copy, tmp_path):
    path = flip_a_bit(step(copy, 6))
    with pytest.raises(CheckpointError) as error:
        run(tmp_path / "other", *RECIPE, "train.steps=8", f"train.resume='{step(copy, 6)}'")
    assert str(path) in str(error.value)
    assert f"the newest whole one there is {step(copy, 4)}" in str(error.value)


@pytest.mark.parametrize(
    "more, says",
    [
        ("model.hidden=20", r"net1.weight has \(10, 10\), expected \(20, 10\)"),
        ("optim=adamw", r"was saved with optim torch.optim.SGD, this run has torch.optim.AdamW"),
        ("seed=1337", "is at step 6 and the run ends at step 6; set train.steps higher"),
    ],
)
def test_what_cannot_be_gone_on_from_is_an_error_that_says_why(whole, tmp_path, more, says):
    recipe = [word for word in RECIPE if more != "optim=adamw" or "momentum" not in word]
    with pytest.raises(UserError, match=says):
        run(tmp_path / "run", *recipe, more, f"train.resume='{whole}'")


def test_a_run_its_checkpoints_and_each_of_them_can_be_named(whole):
    for name in ("", "checkpoints", "checkpoints/latest", "checkpoints/best", "checkpoints/step-00000006"):
        assert Checkpoint.find(whole / name).step == 6


def test_going_back_to_an_older_one_leaves_the_newer_ones_under_another_name(copy, whole, capsys):
    """Else a later train.resume=auto would go on from what this run has left behind."""
    run(copy, *RECIPE, f"train.resume='{step(copy, 2)}'")
    assert losses(copy) == losses(whole)
    assert "is kept as unused-step-00000006" in capsys.readouterr().err
    kept = {path.name for path in (copy / "checkpoints").iterdir() if path.is_dir() and not path.is_symlink()}
    assert kept == {f"{prefix}step-{n:08d}" for n in (4, 6) for prefix in ("", "unused-")} | {"step-00000002"}


def test_a_run_that_was_killed_after_its_last_checkpoint_is_completed(copy, whole):
    """All steps are done; the test split and the summary are not."""
    resumed = run(copy, *RECIPE, "train.resume=auto")
    lines = (whole / "metrics.jsonl").read_text()
    assert (copy / "metrics.jsonl").read_text() == lines
    assert resumed["steps"] == 6 and resumed["first_loss"] == losses(whole)[0]
    assert resumed["test_loss"] is not None


def test_steps_after_the_checkpoint_are_trained_and_recorded_once(copy, whole):
    """Killed after step 5, its newest checkpoint being of step 4, with half a line written."""
    shutil.rmtree(step(copy, 6))
    (copy / "checkpoints" / "latest").unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    run(copy, *RECIPE, "train.resume=auto")
    assert [line["step"] for line in records(copy)] == [line["step"] for line in records(whole)]
    assert losses(copy) == losses(whole)
    assert os.readlink(copy / "checkpoints" / "latest") == "step-00000006"


# -- whole, and of no use ------------------------------------------------------------------------------------------


def rewrite(folder, change):
    """Changes the tensors of a checkpoint's model and makes the manifest fit."""
    path = folder / "model-00.safetensors"
    tensors = load_file(path)
    save_file({name: change(tensor) for name, tensor in tensors.items()}, path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][path.name] = {"sha256": sha256(path), "bytes": path.stat().st_size}
    (folder / "manifest.json").write_text(json.dumps(with_checksum(manifest)))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda tensor: tensor.long(), "holds torch.int64, expected torch.float32"),
        (lambda tensor: tensor.double() + 1e300, "holds torch.float64 beyond what torch.float32 can express"),
    ],
    ids=["int64", "too large"],
)
def test_tensors_of_another_kind_are_refused(copy, tmp_path, change, said):
    rewrite(step(copy, 6), change)
    with pytest.raises(CheckpointError, match=f"net1.* {said}"):
        run(tmp_path / "other", *RECIPE, f"train.resume={step(copy, 6)}")


def test_a_mask_of_minus_infinity_is_finite_enough_and_so_is_an_optimizer_that_overflows():
    assert is_usable("weight/exp_avg_sq", torch.tensor([float("inf")]))
    assert is_usable("mask", torch.tensor([0.0, float("-inf")]))
    assert not is_usable("weight", torch.tensor([0.0, float("inf")]))


def test_a_run_whose_weights_are_not_finite_keeps_its_good_checkpoints(tmp_path, monkeypatch):
    step_of_optimizer, done = Optimizer.step, []

    def diverge(self, lr):
        step_of_optimizer(self, lr)
        done.append(lr)
        if len(done) == 3:
            next(iter(self._parts[0].optimizer.param_groups[0]["params"])).data.view(-1)[0] = float("nan")

    monkeypatch.setattr(Optimizer, "step", diverge)
    keep = ["train.checkpoint_every=1", "train.keep_checkpoints=1", "train.max_skipped=2"]
    with pytest.raises(TrainingError, match="not finite for 3 steps in a row"):
        run(tmp_path / "long", *RECIPE, *keep)
    done.clear()
    with pytest.raises(CheckpointError, match="of step 3 could not be written: net1.weight is not finite"):
        run(tmp_path / "short", *RECIPE, *keep, "train.steps=3")
    for name in ("long", "short"):
        left = sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())
        assert left == ["latest", "step-00000002"]


LONG = ["train.epochs=null", "train.steps=12", "train.checkpoint_every=3", "train.eval_every=4"]


def test_a_run_directory_that_is_deleted_is_begun_anew_and_said(tmp_path, monkeypatch, caplog):
    record_step = Loop._record

    def delete(self, step, *args, **kwargs):
        if step == 8:
            self.checkpoints.wait_pending()
            shutil.rmtree(tmp_path / "run")
        record_step(self, step, *args, **kwargs)

    monkeypatch.setattr(Loop, "_record", delete)
    run(tmp_path / "run", *LONG)
    assert "metrics.jsonl was removed while this run writes to it" in caplog.text
    assert [line["step"] for line in steps(tmp_path / "run")] == [8, 9, 10, 11, 12]
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == "step-00000012"
    monkeypatch.undo()
    run(tmp_path / "run", *LONG, "train.resume=auto", "train.steps=14")
    assert [line["step"] for line in steps(tmp_path / "run")] == list(range(8, 15))


def test_an_error_that_would_come_again_is_not_tried_again(tmp_path):
    recipe = ["logger=none", "device=cpu", "launcher.max_restarts=3", "optim.lr=1e30", "train.max_skipped=2"]
    ended = train(recipe, tmp_path / "run")
    assert ended.code == 1
    assert "train.max_skipped=2" in ended.stderr
    assert "restart 1" not in ended.stderr
