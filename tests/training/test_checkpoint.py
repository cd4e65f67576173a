"""Checkpoints: what they hold, which are kept, and what they do not fit. (Resuming: test_resume_same_command.)"""

import hashlib
import json
import os

import pytest
from composed import run

from common.errors import CheckpointError


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
