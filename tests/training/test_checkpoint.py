"""Checkpoints: a resumed run is bit-exact, and damage is named. (Other layouts: test_resume_layouts.)"""

import hashlib
import json
import os
import shutil

import pytest
import torch
from composed import losses, records, run, saved

from common.errors import CheckpointError
from training.checkpoint.files import with_checksum


@pytest.fixture(scope="module")
def recipe(text):
    """AdamW, whose two moments and step count must be saved too; six steps, dropout, a rate that moves."""
    model = ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.dropout=0.1"]
    length = ["train.steps=6", "train.global_batch_size=8", "train.eval_batches=2", "train.precision=fp32"]
    return [*model, *text, *length, "optim.lr=1e-3", "train.checkpoint_every=3", "train.keep_checkpoints=9"]


@pytest.fixture(scope="module")
def uninterrupted(recipe, tmp_path_factory):
    """The folder of a run from step 1 to 6, with its checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(folder, *recipe)
    return folder


def test_a_resumed_run_gives_the_same_bits(recipe, uninterrupted, tmp_path):
    run(tmp_path, *recipe, f"train.resume='{uninterrupted / 'checkpoints' / 'step-00000003'}'")
    assert losses(tmp_path) == losses(uninterrupted)[3:]
    for kind in ("model", "optimizer"):
        ours, wanted = saved(tmp_path, 6, kind), saved(uninterrupted, 6, kind)
        assert ours.keys() == wanted.keys()
        assert [name for name in ours if not torch.equal(ours[name], wanted[name])] == []


def test_the_state_of_the_optimizer_is_what_makes_it_so(recipe, uninterrupted, tmp_path):
    """Without the moments the losses differ: else the tests of resuming would not see them missing."""
    bare = shutil.copytree(uninterrupted / "checkpoints" / "step-00000003", tmp_path / "bare")
    manifest = json.loads((bare / "manifest.json").read_text())
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if name.startswith("model")}
    (bare / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    run(tmp_path / "rest", *recipe, f"train.resume='{bare}'")
    assert losses(tmp_path / "rest")[1:] != pytest.approx(losses(uninterrupted)[4:], rel=1e-5)


def test_auto_starts_from_the_beginning_where_there_is_no_checkpoint(tmp_path):
    summary = run(tmp_path, "train.epochs=null", "train.steps=2", "train.resume=auto")
    assert summary["steps"] == 2
    assert [line["step"] for line in records(tmp_path) if "loss" in line] == [1, 2]


def test_a_run_that_is_over_says_how_to_go_on(tmp_path):
    run(tmp_path, "train.epochs=null", "train.steps=2")
    with pytest.raises(Exception, match="is at step 2 and the run ends at step 2; set train.steps higher"):
        run(tmp_path, "train.epochs=null", "train.steps=2", "train.resume=auto")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A finished run of the toy model, with momentum."""
    folder = tmp_path_factory.mktemp("toy")
    run(folder, "train.epochs=null", "train.steps=4", "optim.momentum=0.9")
    return folder


def resume(folder, path, *more, optim="optim.momentum=0.9"):
    run(folder, "train.epochs=null", "train.steps=8", optim, f"train.resume='{path}'", *more)


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_what_does_not_fit(toy, tmp_path):
    with pytest.raises(CheckpointError, match=r"net1.weight has \(10, 10\), expected \(20, 10\)"):
        resume(tmp_path / "run", toy / "checkpoints" / "latest", "model.hidden=20")


def test_a_checkpoint_of_another_optimizer_is_refused(toy, tmp_path):
    with pytest.raises(CheckpointError, match=r"was saved with optim torch.optim.SGD, this run has torch.optim.AdamW"):
        resume(tmp_path / "run", toy / "checkpoints" / "latest", optim="optim=adamw")


def test_only_the_newest_are_kept(tmp_path):
    rhythm = ["train.checkpoint_every=1", "train.keep_checkpoints=2"]
    run(tmp_path, "train.epochs=null", "train.steps=5", *rhythm)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["best", "latest", "step-00000004", "step-00000005"]
    assert os.readlink(tmp_path / "checkpoints" / "latest") == "step-00000005"


def test_nothing_is_pickled_and_the_manifest_vouches_for_every_file(toy):
    folder = toy / "checkpoints" / "latest"
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    assert files.keys() == manifest["files"].keys() == {"model-00.safetensors", "optimizer-00.safetensors"}
    for name, content in files.items():
        entry = manifest["files"][name]
        assert entry == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert all({"dtype", "shape", "data_offsets"} == set(tensor) for tensor in header.values())
    assert manifest["step"] == 4
    assert manifest["layout"]["parallel"] == "single"


def test_evaluation_of_a_checkpoint_finds_the_loss_that_the_training_found(toy, tmp_path):
    link = toy / "checkpoints" / "latest"
    summary = run(tmp_path, "mode=eval", f"checkpoint='{link}'")
    trained = json.loads((toy / "summary.json").read_text())
    assert summary["best_val_loss"] == pytest.approx(trained["best_val_loss"], rel=1e-6)
    assert summary["test_loss"] == pytest.approx(trained["test_loss"], rel=1e-6)
    assert summary["steps"] == 4
    assert (summary["first_loss"], summary["step_time_s"]) == (None, None)
