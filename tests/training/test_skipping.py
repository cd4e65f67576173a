"""Steps that are left out: not finite on a single rank, or a loss that jumps. All ranks leave them out together."""

import json
import math

import pytest
import torch
from composed import change_batches, config, losses, run, saved, steps
from skipping_ranks import same, train_spoilt

from common.errors import TrainingError
from conf.instantiate import to_dict
from data.batch import Batch
from data.loader import TrainBatches

RECIPE = ["train.epochs=null", "train.steps=4", "train.global_batch_size=16", "optim=adamw", "train.checkpoint_every=1",
          "train.keep_checkpoints=9", "train.eval_every=null", "train.precision=fp32"]  # fmt: skip
LAYOUTS = {
    "ddp": (2, ["parallel.dp=2"]),
    "pipelined": (2, ["parallel.pp=2", "parallel.chunks=2"]),
    "pipe_ddp": (4, ["parallel.dp=2", "parallel.pp=2", "parallel.chunks=2"]),
}


def spoilt(ranks, tmp_path, layout, rank, what):
    """[(summary, tensors)] by rank, of a training in which ``rank`` has a NaN in step 3."""
    size, overrides = LAYOUTS[layout]
    tree = to_dict(config("model=convnet", *RECIPE, f"parallel={layout}", *overrides))
    folder = tmp_path / "run"
    folder.mkdir()
    return ranks.run(size, train_spoilt, tree, str(folder), str(tmp_path / "meeting"), 3, rank, what)


@pytest.mark.parametrize(
    "layout, rank, what",
    [
        ("ddp", 1, "loss"),
        ("ddp", 1, "gradient"),
        ("pipelined", 1, "loss"),
        ("pipelined", 0, "gradient"),
        ("pipe_ddp", 3, "loss"),
        ("pipe_ddp", 2, "gradient"),
    ],
)
def test_a_nan_on_one_rank_has_all_ranks_skip_that_step(ranks, tmp_path, layout, rank, what):
    results = spoilt(ranks, tmp_path, layout, rank, what)
    folder = tmp_path / "run"
    assert [line["skipped"] for line in steps(folder)] == [False, False, True, False]
    assert all(summary["skipped_steps"] == 1 for summary, _ in results)
    for kind in ("model", "optimizer"):  # weights, BatchNorm's running statistics, the optimizer's state and steps
        assert saved(folder, 3, kind) == {}, "a step that was skipped is no new checkpoint"
        assert not same(saved(folder, 2, kind), saved(folder, 4, kind))
    if layout in ("ddp", "pipe_ddp"):
        half = len(results) // 2
        assert all(same(results[r][1], results[r + half][1]) for r in range(half)), "replicas stay equal"
    assert all(torch.isfinite(tensor).all() for _, tensors in results for tensor in tensors.values())


@pytest.fixture
def jumps(monkeypatch):
    """``jumps(15, 16)``: the targets of these steps are so far off that the loss is a thousand times as large."""

    def far_off(batch):
        return Batch(batch.inputs, batch.targets + 100)

    return lambda *bad: change_batches(monkeypatch, bad, far_off)


TWENTY = ["train.epochs=null", "train.steps=20", "train.checkpoint_every=6", "train.keep_checkpoints=9"]


def test_steps_that_are_skipped_leave_the_checkpoints_before_them(tmp_path, jumps):
    jumps(15, 16, 17)
    every = ["train.checkpoint_every=1", "train.keep_checkpoints=2", "train.steps=17"]
    run(tmp_path, *TWENTY, *every, "train.spike_factor=5")
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000013", "step-00000014"]
    assert (folder / "latest").resolve().name == "step-00000014"
    assert [line["step"] for line in steps(tmp_path)] == list(range(1, 18))


def test_a_checkpoint_that_falls_on_a_skipped_step_is_that_of_the_step_before(tmp_path, jumps):
    jumps(12)
    run(tmp_path, *TWENTY, "train.spike_factor=5")
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-00000006", "step-00000011", "step-00000018", "step-00000020"]


def test_a_jump_of_the_loss_is_skipped_where_that_is_asked_for(tmp_path, jumps):
    jumps(15)
    summary = run(tmp_path / "guarded", *TWENTY, "train.spike_factor=5")
    assert [line["step"] for line in steps(tmp_path / "guarded") if line["skipped"]] == [15]
    assert summary["skipped_steps"] == 1
    run(tmp_path / "free", *TWENTY)
    assert not any(line["skipped"] for line in steps(tmp_path / "free"))
    assert losses(tmp_path / "guarded")[:15] == losses(tmp_path / "free")[:15]
    assert losses(tmp_path / "guarded")[15] < losses(tmp_path / "free")[15]


def test_jumps_in_a_row_lead_back_to_the_newest_checkpoint(tmp_path, jumps, capsys, monkeypatch):
    jumps(15, 16)
    run(tmp_path, *TWENTY, "train.spike_factor=5", "train.spike_rollback=2", "optim.momentum=0.9")
    assert "step 16: the loss keeps jumping: back to the weights of step 12" in capsys.readouterr().err
    lines = steps(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 21)), "no step stands there twice"
    assert [line["step"] for line in lines if line["skipped"]] == [15, 16]
    # Steps 13 and 14 were undone: the weights of step 12 meet the batches from 17 on.
    monkeypatch.undo()
    read = TrainBatches.__getitem__
    monkeypatch.setattr(TrainBatches, "__getitem__", lambda self, step: read(self, step + 4 * (step > 12)))
    run(tmp_path / "without", *TWENTY, "optim.momentum=0.9")
    assert losses(tmp_path)[16:] == losses(tmp_path / "without")[12:16]


def test_a_jump_without_a_checkpoint_to_go_back_to_is_skipped_all_the_same(tmp_path, jumps, capsys):
    jumps(15, 16)
    run(tmp_path, *TWENTY, "train.checkpoint_every=null", "train.spike_factor=5", "train.spike_rollback=2")
    assert "there is no checkpoint yet to go back to" in capsys.readouterr().err
    assert [line["step"] for line in steps(tmp_path) if line["skipped"]] == [15, 16]


def test_too_many_jumps_end_the_run_with_numbers_and_advice(tmp_path, jumps):
    jumps(*range(14, 21))
    with pytest.raises(TrainingError) as error:
        run(tmp_path, *TWENTY, "train.spike_factor=5", "train.max_skipped=3")
    said = str(error.value)
    assert "step 17: loss " in said and "train.spike_factor=5 x the mean" in said
    assert "for 4 steps in a row (train.max_skipped=3)" in said
    assert "a larger train.spike_factor" in said


def test_a_resumed_run_judges_jumps_as_the_uninterrupted_one(tmp_path, jumps):
    jumps(14)
    guarded = [*TWENTY, "train.spike_factor=5"]
    run(tmp_path / "whole", *guarded)
    run(tmp_path / "parts", *guarded, "train.steps=12")
    summary = run(tmp_path / "parts", *guarded, "train.resume=auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert [line["step"] for line in steps(tmp_path / "parts") if line["skipped"]] == [14]
    assert summary["skipped_steps"] == 1


def test_the_summary_counts_no_skipped_steps_where_there_are_none(tmp_path):
    run(tmp_path, "train.epochs=null", "train.steps=2")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["skipped_steps"] == 0
    assert math.isfinite(summary["final_loss"])
