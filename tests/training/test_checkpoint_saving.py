"""Saving beside the training: what is written is the step's own, errors are told, the best and the newest stay."""

import hashlib
import json
import os
import time

import pytest
import torch
import torch.distributed as dist
from composed import QUIET, compose, losses, records, run, run_on_rank, saved
from safetensors.torch import load_file, save_file

from common.errors import CheckpointError
from conf.instantiate import to_dict
from parallel.sharding import Rows
from training import run as run_module
from training.checkpoint import save
from training.checkpoint.files import Checkpoint
from training.checkpoint.load import StoredTensor

STEPS = ["train.epochs=null", "train.steps=6", "optim.momentum=0.9"]
EVERY_2 = [*STEPS, "train.checkpoint_every=2", "train.keep_checkpoints=9"]


@pytest.fixture(scope="module")
def plainly(tmp_path_factory):
    """A run with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("plainly")
    run(folder, *EVERY_2)
    return folder


def same_bits(one, other, steps=(2, 4, 6)):
    for step in steps:
        for kind in ("model", "optimizer"):
            ours, theirs = saved(one, step, kind), saved(other, step, kind)
            assert ours.keys() == theirs.keys()
            assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    return True


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("memory", [float("inf"), 0], ids=["enough", "too little for a copy"])
def test_training_goes_on_while_a_copy_is_written_and_waits_where_there_is_none(tmp_path, plainly, monkeypatch, memory):
    real, seen = save.write_file, []

    def slowly(path, *args):
        """The first checkpoint's files are written only after the training has done another step, if it ever does."""
        if "step-00000002" in str(path):
            deadline = time.monotonic() + (60 if memory else 0.5)
            while records(tmp_path)[-1]["step"] < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(records(tmp_path)[-1]["step"])
        return real(path, *args)

    monkeypatch.setattr(save, "write_file", slowly)
    monkeypatch.setattr(save, "available_memory", lambda: memory)
    run(tmp_path, *EVERY_2)
    assert min(seen) >= 3 if memory else max(seen) == 2
    assert same_bits(tmp_path, plainly)
    assert names(tmp_path) == ["best", "latest", "step-00000002", "step-00000004", "step-00000006"]


def test_the_best_stays_however_old_it_is(tmp_path):
    rhythm = ["train.eval_every=1", "train.checkpoint_every=1", "train.keep_checkpoints=1"]
    summary = run(tmp_path, *STEPS, *rhythm, "optim.lr=3.0")
    found = {line["step"]: line["val_loss"] for line in records(tmp_path) if "val_loss" in line}
    best = min(found, key=found.get)
    assert best < 6, "a rate this high makes it worse: else this test shows nothing"
    assert names(tmp_path) == ["best", "latest", f"step-{best:08d}", "step-00000006"]
    assert os.readlink(tmp_path / "checkpoints" / "best") == f"step-{best:08d}"
    best_of = Checkpoint.find(tmp_path).progress
    assert (best_of["best_step"], best_of["best_val_loss"]) == (best, found[best])
    assert summary["best_val_loss"] == found[best]


def test_an_evaluation_that_is_the_best_so_far_is_saved_though_no_checkpoint_is_due(tmp_path):
    run(tmp_path, *STEPS, "train.eval_every=1", "train.checkpoint_every=0", "train.keep_checkpoints=9")
    found = [(line["step"], line["val_loss"]) for line in records(tmp_path) if "val_loss" in line]
    best = [s for i, (s, loss) in enumerate(found) if all(loss < earlier for _, earlier in found[:i])]
    assert len(best) > 1, "else this test shows nothing"
    assert [name for name in names(tmp_path) if name.startswith("step")] == [
        f"step-{step:08d}" for step in sorted({*best, 6})
    ]


def test_who_wants_no_checkpoints_gets_none_of_the_best_either(tmp_path):
    run(tmp_path, *STEPS, "train.eval_every=1", "train.checkpoint_every=null")
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("more, into", [(["train.resume=auto"], "same"), ([], "other")])
def test_the_summary_of_a_resumed_run_is_that_of_the_whole_run(tmp_path, more, into):
    recipe = [*STEPS, "train.eval_every=1", "optim.lr=3.0"]
    whole = run(tmp_path / "whole", *recipe)
    run(tmp_path / "same", *recipe, "train.steps=4")
    link = tmp_path / "same" / "checkpoints" / "latest"
    resumed = run(tmp_path / into, *recipe, *(more or [f"train.resume='{link}'"]))
    keys = ("steps", "first_loss", "final_loss", "best_val_loss", "test_loss")
    assert {key: resumed[key] for key in keys} == {key: whole[key] for key in keys}


def test_what_a_killed_run_left_half_written_is_cleaned_up(tmp_path):
    folder = tmp_path / "checkpoints"
    for name in (".step-00000004.tmp", ".step-00000002.removed.tmp"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model-00.safetensors").write_bytes(b"half")
    run(tmp_path, *STEPS)
    assert names(tmp_path) == ["best", "latest", "step-00000006"]


def test_nothing_is_pickled_and_the_manifest_vouches_for_every_file(plainly):
    folder = plainly / "checkpoints" / "latest"
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    assert files.keys() == manifest["files"].keys() == {"model-00.safetensors", "optimizer-00.safetensors"}
    for name, content in files.items():
        entry = manifest["files"][name]
        assert entry == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert all({"dtype", "shape", "data_offsets"} == set(tensor) for tensor in header.values())
    assert manifest["step"] == 6
    assert manifest["layout"]["parallel"] == "single"


def test_losses_do_not_depend_on_saving(plainly, tmp_path):
    run(tmp_path, *STEPS, "train.checkpoint_every=null")
    assert losses(tmp_path) == losses(plainly)


# -- several ranks ---------------------------------------------------------------------------------------------------


def run_with_a_fault(tree, folder, meeting, rank, step, fault):
    """On each rank of a pool: a run one rank of which cannot write the checkpoint of a step. What it says of it."""
    real, warned = save.write_file, []

    def faulty(path, *args):
        if dist.get_rank() == rank and f"step-{step:08d}" in str(path) and path.name.startswith("model"):
            if fault == "full":
                raise OSError(28, "No space left on device")
            time.sleep(fault)
        return real(path, *args)

    class Noted(save.Checkpointer):
        warn = property(lambda self: warned.append, lambda self, _: None)

    save.write_file, run_module.Checkpointer = faulty, Noted
    try:
        run_on_rank(tree, folder, meeting)
        return warned
    except CheckpointError as error:
        return str(error)
    finally:
        save.write_file, run_module.Checkpointer = real, save.Checkpointer


@pytest.fixture
def spoilt(ranks, tmp_path):
    """``spoilt(layout, rank, step, fault)``: what each of two ranks says; the run is in ``tmp_path``."""

    def begin(layout, *fault):
        words = (*QUIET, *EVERY_2, f"parallel={layout}", "parallel.dp=null", "parallel.timeout_s=4")
        tree = to_dict(compose(*words))
        return ranks.run(2, run_with_a_fault, tree, str(tmp_path), str(tmp_path / "meeting"), *fault)

    return begin


@pytest.mark.parametrize("layout, rank", [("pipelined", 1), ("fsdp", 1), ("ddp", 0)])
def test_a_rank_that_cannot_write_is_named_to_all_and_the_next_checkpoint_is_written(spoilt, tmp_path, layout, rank):
    one, other = spoilt(layout, rank, 2, "full")
    assert one == other and len(one) == 1
    assert one[0].startswith(f"the checkpoint of step 2 could not be written: rank {rank}: [Errno 28] No space left")
    assert "MiB are free at" in one[0]
    assert names(tmp_path) == ["best", "latest", "step-00000004", "step-00000006"]


def test_the_last_checkpoint_that_cannot_be_written_is_an_error_on_every_rank(spoilt, tmp_path):
    one, other = spoilt("pipelined", 1, 6, "full")
    assert one == other and "of step 6 could not be written: rank 1: [Errno 28] No space left" in one
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000004"]


def test_a_rank_that_writes_nothing_for_too_long_is_waited_for_no_longer(spoilt, tmp_path):
    said = spoilt("pipelined", 1, 6, 6.0)
    assert all("it waited until all ranks had written their files (parallel.timeout_s)" in words for words in said)
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000004"]


def test_after_a_rank_that_was_silent_the_next_checkpoint_is_written(spoilt, tmp_path):
    one, other = spoilt("pipelined", 1, 4, 6.0)
    assert len(one) == len(other) == 1
    assert names(tmp_path) == ["best", "latest", "step-00000002", "step-00000006"]


# -- one file of several ranks ---------------------------------------------------------------------------------------

TENSORS = {
    "weight": torch.arange(35, dtype=torch.float32).view(7, 5),
    "bias": torch.arange(7, dtype=torch.bfloat16),
    "step": torch.tensor(3.0),
    "count": torch.tensor(9),
    "wide": torch.arange(2, dtype=torch.float64),
    "phase": torch.ones(3, dtype=torch.complex64),
}
SHARED = {"weight", "bias", "wide"}


def rows(number, of):
    """What one of several ranks holds; of two rows for three ranks the last one has none."""
    held = {}
    for name, tensor in TENSORS.items():
        if name not in SHARED:
            held[name] = Rows(tensor, 0, tuple(tensor.shape), shared=False)
            continue
        each = -(-len(tensor) // of)
        start = min(number * each, len(tensor))
        held[name] = Rows(tensor[start : start + each], start, tuple(tensor.shape), shared=True)
    return held


@pytest.mark.parametrize("writers", [1, 3])
def test_ranks_that_write_their_rows_in_any_order_make_one_file_that_the_library_reads(tmp_path, writers):
    path = tmp_path / "draft" / "model-00.safetensors"
    for number in reversed(range(writers)):
        save.write_file(path, rows(number, writers), number == 0)
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    assert all(read[name].dtype == t.dtype and torch.equal(read[name], t) for name, t in TENSORS.items())


def test_rows_are_read_from_what_the_library_has_written(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    for name, tensor in TENSORS.items():
        stored = StoredTensor(tmp_path / "model.safetensors", name)
        assert (stored.shape, stored.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(stored[...], tensor)
    weight = StoredTensor(tmp_path / "model.safetensors", "weight")
    assert torch.equal(weight[2:4], TENSORS["weight"][2:4])
    assert weight[7:7].shape == (0, 5)
