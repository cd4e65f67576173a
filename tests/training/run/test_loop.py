"""The training loop: what is skipped, clipped, evaluated and saved, in this process or with one spoilt rank."""

import json
import math
from copy import deepcopy

import pytest
import torch
from composed import change_batches, losses, records, run, saved, steps
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from common.errors import CheckpointError, TrainingError
from data.dataset import Batch
from data.loader import TrainBatches
from data.tensors import TensorData
from models.losses import SquaredError
from training import train

SHORT = ["train.epochs=null", "train.steps=6"]
TWENTY = ["train.epochs=null", "train.steps=20", "train.checkpoint_every=6", "train.keep_checkpoints=9"]
EVERY_STEP = ["train.checkpoint_every=1", "train.keep_checkpoints=100"]
GUARDED = "train.spike_factor=5"


@pytest.fixture
def spoil(monkeypatch):
    """``spoil("nan", 3, 4)``: the batches of steps 3 and 4 hold a NaN. With "jump", targets that are far off."""

    def nan(batch):
        inputs = batch.inputs.clone()
        inputs[0, 0] = math.nan
        return Batch(inputs, batch.targets)

    def jump(batch):
        return Batch(batch.inputs, batch.targets + 100)

    return lambda how, *bad: change_batches(monkeypatch, bad, {"nan": nan, "jump": jump}[how])


def skipped(folder):
    return [line["step"] for line in steps(folder) if line["skipped"]]


def checkpoints(folder):
    return [int(path.name.removeprefix("step-")) for path in sorted(folder.glob("checkpoints/step-*"))]


# -- steps that are skipped ------------------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_is_skipped_and_the_schedule_goes_on(tmp_path, spoil):
    recipe = [*SHORT, *EVERY_STEP, "optim.momentum=0.9"]
    recipe += ["scheduler=step", "scheduler.unit=step", "scheduler.gamma=0.5"]
    spoil("nan", 3)
    run(tmp_path, *recipe)
    lines = steps(tmp_path)
    assert skipped(tmp_path) == [3]
    assert (lines[2]["loss"], lines[2]["grad_norm"]) == (None, None)
    assert [line["lr"] for line in lines] == pytest.approx([0.05 * 0.5**n for n in range(6)])
    assert checkpoints(tmp_path) == [1, 2, 4, 5, 6], "a step that was skipped is no new checkpoint"
    before, after, momentum = saved(tmp_path, 2), saved(tmp_path, 4), saved(tmp_path, 4, "optimizer")
    for name in before:  # step 4 alone has moved them, by its learning rate times the momentum
        moved = before[name] - lines[3]["lr"] * momentum[f"{name}/momentum_buffer"]
        torch.testing.assert_close(after[name], moved)
    assert all(math.isfinite(line["loss"]) for line in lines[3:])


class Moving(nn.Module):
    """Adds a mean that every training forward moves."""

    def __init__(self, kept, move):
        super().__init__()
        setattr(self, "mean", kept) if isinstance(kept, nn.Parameter) else self.register_buffer("mean", kept)
        self.move = move

    def forward(self, x):
        if self.training:
            self.move(self, x.detach().mean(dim=0))
        return x + self.mean


def in_place(module, mean):
    module.mean.data.lerp_(mean, 0.1)


def another(module, mean):
    module.mean = torch.lerp(module.mean, mean, 0.1)


MOVING = {
    "a buffer": lambda: Moving(torch.zeros(3), in_place),
    "a new tensor as buffer": lambda: Moving(torch.zeros(3), another),
    "a frozen parameter": lambda: Moving(nn.Parameter(torch.zeros(3), requires_grad=False), in_place),
    "the vectors of spectral_norm": lambda: spectral_norm(nn.Linear(3, 3)),
    "two of them": lambda: nn.Sequential(MOVING["a buffer"](), nn.Linear(3, 3), MOVING["a buffer"]()),
}


@pytest.mark.parametrize("layer", MOVING.values(), ids=MOVING)
def test_a_skipped_step_leaves_what_a_forward_changes_as_it_was(tmp_path, layer):
    torch.manual_seed(1)
    net = nn.Sequential(layer(), nn.Linear(3, 1))
    plain, x, y = deepcopy(net), torch.randn(2, 3), torch.randn(2, 1)
    (plain(x[:1]) - y[:1]).square().mean().backward()
    torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1).step()
    y[1] = math.nan  # one of the two steps is skipped
    result = train(
        "parallel=single", "train.epochs=null", "train.steps=2", "train.global_batch_size=1", "optim=sgd",
        "optim.lr=0.1", "scheduler=constant", "train.precision=fp32", "logger=none", f"hydra.run.dir='{tmp_path}'",
        model=net, loss=nn.MSELoss(), data=TensorData(x, y, valid=0, test=0),
    )  # fmt: skip
    state = result.state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name], tensor, msg=lambda words, name=name: f"{name}: {words}")


def test_such_steps_that_are_not_in_a_row_do_not_add_up_and_the_summary_is_json(tmp_path, spoil):
    spoil("nan", 1, 2, 4, 5)
    run(tmp_path, *SHORT, "train.max_skipped=2")
    assert skipped(tmp_path) == [1, 2, 4, 5]
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert (summary["steps"], summary["skipped_steps"]) == (6, 4)
    assert math.isfinite(summary["final_loss"])


TOO_MANY = {
    "all": ("nan", range(1, 7), SHORT, ["no step counted: the updates of all 6 steps were skipped", "loss nan"]),
    "not finite": (
        "nan", [2, 3, 4], [*SHORT, "train.max_skipped=2"],
        ["step 4", "3 steps in a row (train.max_skipped=2)", "optim.lr", "train.grad_clip", "train.precision=fp32",
         "debug=anomaly"],
    ),
    "jumps": (
        "jump", range(14, 21), [*TWENTY, GUARDED, "train.max_skipped=3"],
        ["step 17: loss ", "train.spike_factor=5 x the mean", "for 4 steps in a row (train.max_skipped=3)",
         "a larger train.spike_factor"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("how, bad, words, says", TOO_MANY.values(), ids=TOO_MANY)
def test_too_many_of_them_end_the_run_with_numbers_and_advice(tmp_path, spoil, how, bad, words, says):
    spoil(how, *bad)
    with pytest.raises(TrainingError) as error:
        run(tmp_path, *words)
    assert [text for text in says if text not in str(error.value)] == []
    assert steps(tmp_path)[0]["step"] == 1, "what was trained is on record"
    assert not (tmp_path / "summary.json").exists()


def test_a_jump_of_the_loss_is_skipped_where_that_is_asked_for_and_never_saved(tmp_path, spoil):
    spoil("jump", 12)
    guarded, free = tmp_path / "guarded", tmp_path / "free"
    summary = run(guarded, *TWENTY, GUARDED)
    run(free, *TWENTY)
    assert (skipped(guarded), summary["skipped_steps"], skipped(free)) == ([12], 1, [])
    assert losses(guarded)[:12] == losses(free)[:12] and losses(guarded)[12] < losses(free)[12]
    assert checkpoints(guarded) == [6, 11, 18, 20], "that of step 12 is that of the step before"


def test_jumps_in_a_row_lead_back_to_the_newest_checkpoint(tmp_path, spoil, capsys, monkeypatch):
    spoil("jump", 15, 16)
    run(tmp_path, *TWENTY, GUARDED, "train.spike_rollback=2", "optim.momentum=0.9")
    assert "step 16: repeated loss spikes: restored the weights of step 12" in capsys.readouterr().err
    assert [line["step"] for line in steps(tmp_path)] == list(range(1, 21)), "no step stands there twice"
    assert skipped(tmp_path) == [15, 16]
    # Steps 13 and 14 were undone: the weights of step 12 meet the batches from 17 on.
    monkeypatch.undo()
    read = TrainBatches.__getitem__
    monkeypatch.setattr(TrainBatches, "__getitem__", lambda self, step: read(self, step + 4 * (step > 12)))
    run(tmp_path / "without", *TWENTY, "optim.momentum=0.9")
    assert losses(tmp_path)[16:] == losses(tmp_path / "without")[12:16]


def test_a_jump_without_a_checkpoint_to_go_back_to_is_skipped_all_the_same(tmp_path, spoil, capsys):
    spoil("jump", 15, 16)
    run(tmp_path, *TWENTY, "train.checkpoint_every=null", GUARDED, "train.spike_rollback=2")
    assert "there is no checkpoint yet to go back to" in capsys.readouterr().err
    assert skipped(tmp_path) == [15, 16]


def test_losses_below_zero_are_no_jumps(tmp_path, monkeypatch):
    compute = SquaredError.__call__

    def below_zero(self, *given):
        sums = compute(self, *given)
        return sums._replace(loss=sums.loss - 100 * sums.count)

    monkeypatch.setattr(SquaredError, "__call__", below_zero)
    assert run(tmp_path, *TWENTY, GUARDED)["skipped_steps"] == 0
    assert losses(tmp_path)[-1] < 0


def test_a_resumed_run_judges_jumps_as_the_uninterrupted_one(tmp_path, spoil):
    spoil("jump", 14)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, *TWENTY, GUARDED)
    run(parts, *TWENTY, GUARDED, "train.steps=12")
    summary = run(parts, *TWENTY, GUARDED, "train.resume=auto")
    assert losses(parts) == losses(whole)
    assert skipped(parts) == [14] and summary["skipped_steps"] == 1


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("saved_after", [3, 4], ids=["a step that counted", "a step that was skipped"])
def test_a_run_in_float16_goes_on_with_the_loss_scale_of_the_weights_that_were_saved(tmp_path, spoil, saved_after):
    spoil("nan", 4)
    half = ["train.epochs=null", "train.precision=fp16", "scheduler=constant"]
    run(tmp_path / "whole", *half, "train.steps=6")
    run(tmp_path / "halves", *half, f"train.steps={saved_after}")
    run(tmp_path / "halves", *half, "train.steps=6", "train.resume=auto")
    scales = {
        (name, step): json.loads((tmp_path / name / f"checkpoints/step-{step:08d}/manifest.json").read_text())
        for name, step in (("whole", 6), ("halves", 3), ("halves", 6))
    }
    scales = {key: (m["loss_scale"]["scale"], m["loss_scale"]["good_steps"]) for key, m in scales.items()}
    assert scales == {("whole", 6): (32768.0, 2), ("halves", 3): (65536.0, 3), ("halves", 6): (32768.0, 2)}
    assert same(saved(tmp_path / "whole", 6), saved(tmp_path / "halves", 6))


# -- clipping --------------------------------------------------------------------------------------------------------


def moves(folder):
    """By how far all weights together moved in each step from the second on, and the largest movement of one number."""
    for step in range(2, 7):
        before, after = saved(folder, step - 1), saved(folder, step)
        moved = torch.cat([(after[name] - before[name]).double().flatten() for name in after])
        yield moved.norm().item(), moved.abs().max().item()


CLIPPED = [
    (["train.grad_clip=0.01"], 0.01, None),
    (["train.clip_value=0.001"], None, 0.001),
    (["train.clip_value=0.001", "train.grad_clip=0.005"], 0.005, None),  # by value first
]


@pytest.mark.parametrize("words, norm, largest", CLIPPED)
def test_clipping_bounds_how_far_a_step_moves_the_weights(tmp_path, words, norm, largest):
    run(tmp_path, *SHORT, *EVERY_STEP, "optim.lr=1.0", *words)
    for moved, most in moves(tmp_path):
        if norm is not None:
            assert moved == pytest.approx(norm, rel=1e-3)
        else:
            assert most == pytest.approx(largest, rel=1e-3)
            assert moved > 5 * largest, "most numbers are at the bound: each was clamped, not all scaled"
    if norm is not None:
        assert min(line["grad_norm"] for line in steps(tmp_path)) > 1.5 * norm, "written down is that before clipping"


def test_a_norm_below_the_clip_is_left_alone(tmp_path):
    free, clipped = tmp_path / "free", tmp_path / "clipped"
    for folder, clip in ((free, "null"), (clipped, "1e6")):
        run(folder, *SHORT, *EVERY_STEP, "optim.lr=1.0", f"train.grad_clip={clip}")
    assert losses(free) == losses(clipped)
    assert [norm for norm, _ in moves(free)] == pytest.approx([line["grad_norm"] for line in steps(free)[1:]], rel=1e-3)


# -- evaluations, checkpoints, seeds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("every, expected", [("2", [2, 4, 5]), ("0", [5]), ("null", [])])
def test_evaluations_and_checkpoints_come_as_often_as_asked_and_at_the_end(tmp_path, every, expected):
    rhythm = [f"train.eval_every={every}", f"train.checkpoint_every={every}", "train.keep_checkpoints=9"]
    summary = run(tmp_path, "train.epochs=null", "train.steps=5", *rhythm)
    assert [line["step"] for line in records(tmp_path) if "val_loss" in line] == expected
    assert checkpoints(tmp_path) == expected
    assert (summary["best_val_loss"] is None) == (expected == [])


def test_an_evaluation_changes_nothing_and_one_of_few_batches_sees_fewer_samples(tmp_path):
    found = {}
    for name, words in {
        "all": ["train.eval_every=1"],
        "one": ["train.eval_batches=1"],
        "many": ["train.eval_batches=1000"],
        "none": ["train.eval_every=null"],
    }.items():
        run(tmp_path / name, *SHORT, *words)
        found[name] = losses(tmp_path / name), records(tmp_path / name)[-1].get("val_loss")
    assert all(trained == found["all"][0] for trained, _ in found.values())
    assert found["one"][1] != found["all"][1] == found["many"][1]


def test_overfit_trains_on_the_same_batch_where_the_first_layer_works_in_place(tmp_path, monkeypatch):
    def doubled(self, x):
        return nn.functional.linear(x if x.requires_grad else x.mul_(2), self.weight, self.bias)

    monkeypatch.setattr(nn.Linear, "forward", doubled)
    run(tmp_path, "debug=overfit", *SHORT, "train.precision=fp32", "optim.lr=0")
    assert len(set(losses(tmp_path))) == 1


def test_a_run_is_only_deterministic_if_it_is_asked_to_be(tmp_path, deterministic_again):
    for wanted in (True, False):
        run(tmp_path / str(wanted), *SHORT, f"train.deterministic={wanted}")
        assert torch.are_deterministic_algorithms_enabled() is wanted


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path, text, deterministic_again):
    recipe = ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.dropout=0.1", *text, "data.vocabulary=words"]
    recipe += ["model.vocab_size=384", "train.global_batch_size=4", "train.steps=4", "train.eval_batches=2"]
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        run(tmp_path / name, *recipe, "train.deterministic=true", f"seed={seed}")
    one, again, other = (saved(tmp_path / name, 4) for name in ("one", "again", "other"))
    assert losses(tmp_path / "one") == losses(tmp_path / "again") != losses(tmp_path / "other")
    assert same(one, again)
    assert not torch.equal(one["embedding.wte.weight"], other["embedding.wte.weight"])


def test_a_folder_of_checkpoints_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="checkpoints"):
        run(tmp_path, *SHORT)
