"""One safetensors file that several ranks write, each its rows."""

import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import CheckpointError
from parallel.sharding import Rows
from training.checkpoint import snapshot
from training.checkpoint.commit import await_stages
from training.checkpoint.snapshot import Share, StageFiles, write_stage
from training.checkpoint.tensor_file import StoredTensor, write_rows

TENSORS = {
    "weight": torch.arange(35, dtype=torch.float32).view(7, 5),
    "bias": torch.arange(7, dtype=torch.bfloat16),
    "step": torch.tensor(3.0),
    "count": torch.tensor(9),
    "wide": torch.arange(2, dtype=torch.float64),
}
SHARED = {"weight", "bias", "wide"}


def rows(number, of, tensors=TENSORS):
    """What one of several ranks holds; of two rows for three ranks the last one has none."""
    held = {}
    for name, tensor in tensors.items():
        if name not in SHARED:
            held[name] = Rows(tensor, 0, tuple(tensor.shape), shared=False)
            continue
        each = -(-len(tensor) // of)
        start = min(number * each, len(tensor))
        held[name] = Rows(tensor[start : start + each], start, tuple(tensor.shape), shared=True)
    return held


@pytest.mark.parametrize("writers", [1, 2, 3, 8])
def test_ranks_that_write_their_rows_in_any_order_make_one_file_that_the_library_reads(tmp_path, writers):
    path = tmp_path / "model-00.safetensors"
    digests = {write_rows(path, rows(n, writers), first=n == 0) for n in reversed(range(writers))}
    assert len(digests) == 1
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    assert all(read[name].dtype == t.dtype and torch.equal(read[name], t) for name, t in TENSORS.items())


def test_rows_are_read_from_what_the_library_has_written(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    for name, tensor in TENSORS.items():
        stored = StoredTensor(tmp_path / "model.safetensors", name)
        assert stored.shape == tensor.shape
        assert torch.equal(stored[...], tensor)
    weight = StoredTensor(tmp_path / "model.safetensors", "weight")
    assert torch.equal(weight[2:4], TENSORS["weight"][2:4])
    assert weight[7:7].shape == (0, 5)


def share(number, of, tensors=TENSORS):
    held = rows(number, of, tensors)
    files = {"model-00.safetensors": {name: part.tensor for name, part in held.items()}}
    return StageFiles(0, files, Share(number, of, held))


def test_the_first_writer_waits_for_the_others_and_then_tells_rank_0_of_the_whole_file(tmp_path):
    later = threading.Timer(0.3, write_stage, [tmp_path, share(1, 2)])
    later.start()
    assert write_stage(tmp_path, share(0, 2), timeout_s=20) is None
    later.join()
    files = await_stages(tmp_path, stages=1, timeout_s=1)
    path = tmp_path / "model-00.safetensors"
    assert files == {path.name: {"sha256": snapshot.sha256(path), "bytes": path.stat().st_size}}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model-00.safetensors", "stage-00.json"]


def test_a_writer_that_fails_is_named_to_rank_0(tmp_path, monkeypatch):
    def no_room(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(snapshot, "write_rows", no_room)
        assert "No space left" in write_stage(tmp_path, share(1, 2))
    write_stage(tmp_path, share(0, 2), timeout_s=5)
    with pytest.raises(CheckpointError, match="stage 0: stage 0, share 1: .*No space left on device"):
        await_stages(tmp_path, stages=1, timeout_s=1)


def test_a_writer_that_writes_nothing_is_named_after_the_time_limit(tmp_path):
    assert "stage 0, share 1 of 1 has written nothing" in write_stage(tmp_path, share(0, 2), timeout_s=0.3)


def test_writers_with_different_tensors_do_not_make_a_file(tmp_path):
    other = {**TENSORS, "weight": torch.zeros(9, 5)}
    write_stage(tmp_path, share(1, 2, other))
    assert "share 1 has other tensors than the first" in write_stage(tmp_path, share(0, 2), timeout_s=5)
