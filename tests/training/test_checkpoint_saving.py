"""Saving beside the training: what is written is the step's own, errors are told, the best and the newest stay."""

import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from composed import losses, records, run, saved

from common.errors import CheckpointError
from training.checkpoint import commit, save, snapshot
from training.checkpoint.manifest import parse_manifest, sidecar_name
from training.checkpoint.snapshot import StageFiles

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


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(tmp_path, plainly, monkeypatch):
    real, seen = snapshot.write_file, []

    def slowly(path, tensors):
        """The first checkpoint's files are written only after the training has done another step."""
        if "step-00000002" in str(path):
            deadline = time.monotonic() + 60
            while records(tmp_path)[-1]["step"] < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(records(tmp_path)[-1]["step"])
        return real(path, tensors)

    monkeypatch.setattr(snapshot, "write_file", slowly)
    run(tmp_path, *EVERY_2)
    assert min(seen) >= 3
    assert same_bits(tmp_path, plainly)
    assert names(tmp_path) == ["best", "latest", "step-00000002", "step-00000004", "step-00000006"]


def test_every_save_copies_into_the_same_memory(tmp_path, plainly, monkeypatch):
    copy_files, used = snapshot.copy_files, []

    def noted(*args):
        copies = copy_files(*args)
        used.append({t.data_ptr() for stage in copies for t in stage.tensors().values()})
        return copies

    monkeypatch.setattr(save, "copy_files", noted)
    run(tmp_path, *EVERY_2)
    assert len(used) == 2 and used[0] == used[1], "steps 2 and 4; the last one is not copied"
    assert same_bits(tmp_path, plainly)


def test_without_memory_for_a_copy_a_checkpoint_is_written_at_once(tmp_path, plainly, monkeypatch):
    monkeypatch.setattr(snapshot, "available_memory", lambda: 0)
    real, writers = snapshot.write_file, []

    def note(path, tensors):
        writers.append((path.parent.name[:14], threading.current_thread() is threading.main_thread()))
        return real(path, tensors)

    monkeypatch.setattr(snapshot, "write_file", note)
    run(tmp_path, *EVERY_2)
    assert {name for name, at_once in writers if at_once} == {".step-00000002", ".step-00000004"}
    assert same_bits(tmp_path, plainly)


@pytest.mark.parametrize(
    "free, reserved, peak, writers, fits",
    [
        (20, 60, 60, 1, True),
        (2, 78, 78, 1, False),  # 68 of the 78 are free now, and the next step needs them
        (2, 78, 60, 1, True),
        (8, 36, 36, 1, True),
        (8, 36, 36, 2, False),  # another process on the GPU takes as much
    ],
)
def test_a_copy_stays_on_a_gpu_that_has_space_for_it_beside_the_next_step(
    monkeypatch, free, reserved, peak, writers, fits
):
    gib, gpu = 2**30, torch.device("cuda", 0)
    tensor = SimpleNamespace(device=gpu, nbytes=5 * gib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * gib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak * gib)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "host")
    assert snapshot._devices_with_space([tensor], writers) == ({gpu} if fits else set())
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert snapshot._devices_with_space([tensor], 64) == snapshot._devices_with_space([tensor], 1)


def test_the_best_stays_however_old_it_is(tmp_path):
    rhythm = ["train.eval_every=1", "train.checkpoint_every=1", "train.keep_checkpoints=1"]
    summary = run(tmp_path, *STEPS, *rhythm, "optim.lr=3.0")
    found = {line["step"]: line["val_loss"] for line in records(tmp_path) if "val_loss" in line}
    best = min(found, key=found.get)
    assert best < 6, "a rate this high makes it worse: else this test shows nothing"
    assert names(tmp_path) == ["best", "latest", f"step-{best:08d}", "step-00000006"]
    assert os.readlink(tmp_path / "checkpoints" / "best") == f"step-{best:08d}"
    manifest = parse_manifest(tmp_path / "checkpoints" / "latest" / "manifest.json")
    assert (manifest["progress"]["best_step"], manifest["progress"]["best_val_loss"]) == (best, found[best])
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
    for name in (".step-00000004.dead-1.tmp", ".step-00000002.removed.tmp"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model-00.safetensors").write_bytes(b"half")
    run(tmp_path, *STEPS)
    assert names(tmp_path) == ["best", "latest", "step-00000006"]


def test_a_stage_that_writes_nothing_is_named_after_the_time_limit(tmp_path):
    snapshot.write_sidecar(tmp_path, sidecar_name(0, 0), {"files": {}})
    with pytest.raises(CheckpointError, match=r"stage 1 of 2 has written nothing to .* for 0.3 s \(parallel.timeout_s"):
        commit.await_stages(tmp_path, stages=2, timeout_s=0.3)


def test_a_stage_that_is_slow_but_writes_is_waited_for(tmp_path):
    snapshot.write_sidecar(tmp_path, sidecar_name(0, 0), {"files": {}})

    def slowly():
        with open(tmp_path / "model-01.safetensors", "wb") as file:
            for _ in range(8):
                time.sleep(0.25)
                file.write(b"x")
                file.flush()
        snapshot.write_sidecar(tmp_path, sidecar_name(1, 0), {"files": {"model-01.safetensors": {}}})

    thread = threading.Thread(target=slowly)
    thread.start()
    assert list(commit.await_stages(tmp_path, stages=2, timeout_s=1.5)) == ["model-01.safetensors"]
    thread.join()


@pytest.mark.parametrize("full", ["files", "everything"])
def test_a_stage_that_cannot_write_tells_rank_0_even_on_a_full_disk(tmp_path, monkeypatch, full):
    def no_room(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "write_file", no_room)
    if full == "everything":
        monkeypatch.setattr(snapshot, "write_atomically", no_room)
    error = snapshot.write_stage(tmp_path / "draft", StageFiles(1, {"model-01.safetensors": {}}))
    assert "No space left on device" in error and "MiB are free" in error
    said = "No space left on device" if full == "files" else "no room was left to say why"
    (tmp_path / "draft" / sidecar_name(0)).write_text(json.dumps({"files": {}}))
    with pytest.raises(CheckpointError, match=f"stage 1: .*{said}"):
        commit.await_stages(tmp_path / "draft", stages=2, timeout_s=60)


def test_every_flipped_bit_of_a_manifest_is_noticed_or_changes_nothing(plainly, tmp_path):
    whole = (plainly / "checkpoints" / "latest" / "manifest.json").read_bytes()
    path = tmp_path / "manifest.json"
    path.write_bytes(whole)
    wanted, unnoticed = parse_manifest(path), []
    for at in range(len(whole)):
        content = bytearray(whole)
        content[at] ^= 1 << at % 8
        path.write_bytes(content)
        try:
            if parse_manifest(path) != wanted:
                unnoticed.append(at)
        except CheckpointError:
            continue
    assert unnoticed == []


def test_losses_do_not_depend_on_saving(plainly, tmp_path):
    run(tmp_path, *STEPS, "train.checkpoint_every=null")
    assert losses(tmp_path) == losses(plainly)
