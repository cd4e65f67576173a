"""The best weights: which metric says so, in which direction, and who has them; beside a loop in plain torch."""

import os
from copy import deepcopy

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from common.errors import UserError
from data.tensors import TensorData
from models.losses import Sums
from training import load, train
from training.reporting.monitor import direction_of
from training.studies.sweep.report import set_direction

LESS = """loss val_loss val/loss valLoss token_loss val_dice_loss error top1_error word_error_rate perplexity mse
    val_rmse mean_absolute_error nll negative_log_likelihood cross_entropy CrossEntropy bits_per_byte cer fid
    brier_score kl_divergence loss_per_token false_positive_rate step_time_s peak_memory_bytes latency_ms
    time_to_accuracy"""
MORE = """accuracy val_accuracy test_acc top5 top_5_accuracy acc1 f1 val_f1_macro F1 auroc val_roc_auc BLEU4 rougeL
    ROUGE-L val_mIoU mAP50 recall@5 tpr_at_fpr_0.01 precision r2_score psnr samples_per_s pass@1 exact_match ndcg@10
    win_rate neg_mean_squared_error true_negative_rate log_likelihood val_token_accuracy tokenAccuracy"""
UNKNOWN = """quality val_score accuracy_gap loss_std val_los one_minus_accuracy depth norm lr error_reduction
    time_saved error_free_rate loss_improvement success_steps return_length"""


@pytest.mark.parametrize("names, direction", [(LESS, "minimize"), (MORE, "maximize"), (UNKNOWN, None)])
def test_a_metric_s_name_tells_its_direction_or_nothing(names, direction):
    assert {name: direction_of(name) for name in names.split()} == dict.fromkeys(names.split(), direction)


class Net(nn.Module):
    """Not an nn.Sequential, and with tied weights."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(20, 20), nn.Linear(20, 2)
        self.again = nn.Linear(20, 20)
        self.again.weight = self.first.weight

    def forward(self, x):
        return self.last(self.again(self.first(x).relu()).relu())


class Quality:
    """A loss with a metric that no one knows."""

    metrics = ("quality",)

    def __call__(self, output, targets, weights):
        weights = torch.ones_like(targets, dtype=output.dtype) if weights is None else weights.to(output.dtype)
        terms = cross_entropy(output, targets, reduction="none") * weights
        return Sums(terms.sum(), weights.sum(), (-terms.sum(),))


@pytest.fixture(scope="module")
def own():
    """A network and noisy labels, of which accuracy and loss have their best at different steps."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(300, 20, generator=generator)
    labels = (inputs[:, 0] + 0.8 * torch.randn(300, generator=generator) > 0).long()
    torch.manual_seed(5)
    parts = [(inputs[a:b], labels[a:b]) for a, b in ((0, 100), (100, 200), (200, 300))]
    return Net(), parts, TensorData(*parts[0], valid=parts[1], test=parts[2])


STEPS = 30
WORDS = [
    "train.epochs=null", f"train.steps={STEPS}", "train.eval_every=1", "train.global_batch_size=100", "optim=sgd",
    "train.precision=fp64", "optim.lr=1.0", "logger=none", "device=cpu", "parallel.threads=1",
]  # fmt: skip


def plain(own):
    """The weights after each step, and the loss and the accuracy on the second and the third part."""
    net, (first, *others), _ = own
    net, found = deepcopy(net).double(), {}
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        cross_entropy(net(first[0].double()), first[1]).backward()
        optimizer.step()
        with torch.no_grad():
            results = [(net(x.double()), y) for x, y in others]
            results = [(cross_entropy(o, y).item(), (o.argmax(1) == y).double().mean().item()) for o, y in results]
        found[step] = deepcopy(net.state_dict()), *results
    return found


@pytest.fixture(scope="module")
def expected(own):
    return plain(own)


def run(own, folder, *words, loss=None):
    net, _, data = own
    return train(*WORDS, *words, f"hydra.run.dir={folder}", model=net, loss=loss or nn.CrossEntropyLoss(), data=data)


@pytest.fixture(scope="module")
def ended(own, tmp_path_factory):
    return run(own, tmp_path_factory.mktemp("ended") / "run", "train.monitor=val_accuracy", "train.test=best")


def test_the_best_weights_are_those_of_a_plain_loop_by_the_metric_that_is_asked_for(own, ended, expected, capsys):
    by_loss = min(expected, key=lambda step: expected[step][1][0])
    best = max(expected, key=lambda step: expected[step][1][1])
    assert by_loss != best != STEPS, "else this test shows nothing"
    weights, (_, accuracy), (test_loss, test_accuracy) = expected[best]
    summary, folder = ended.summary, ended.run_dir / "checkpoints" / "best"
    assert (summary["monitor"], summary["monitor_direction"]) == ("val_accuracy", "maximize")
    assert (summary["best_step"], summary["best_val_accuracy"]) == (best, pytest.approx(accuracy))
    assert summary["best_val_loss"] == pytest.approx(expected[by_loss][1][0])
    assert os.readlink(folder) == f"step-{best:08d}"
    tested = [summary[key] for key in ("tested_weights", "tested_step", "test_loss", "test_accuracy")]
    assert tested == ["best", best, pytest.approx(test_loss), pytest.approx(test_accuracy)]
    again = run(own, ended.run_dir.parent / "eval", "mode=eval", f"checkpoint={folder}")
    assert again.summary["test_loss"] == summary["test_loss"]
    for found in (ended.state_dict("best"), load(ended.run_dir, "best"), load(folder), again.state_dict()):
        assert found.keys() == weights.keys()
        torch.testing.assert_close(found, dict(weights), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ended.state_dict(), dict(expected[STEPS][0]), rtol=1e-9, atol=1e-12)
    with pytest.raises(UserError, match="'bset'"):
        ended.state_dict("bset")


def test_the_last_lines_say_of_which_weights_the_test_was(own, tmp_path, expected, capsys):
    best = min(expected, key=lambda step: expected[step][1][0])
    summary = run(own, tmp_path / "run").summary
    assert summary["test_loss"] == pytest.approx(expected[STEPS][2][0])
    said = capsys.readouterr().out
    assert f" (best weights, step {best})\ntest loss" in said
    assert f" (last weights, step {STEPS})\ntest accuracy" in said


def test_an_export_of_a_module_loads_into_it_and_begins_a_run(own, ended, expected):
    net, _, _ = own
    folder = ended.run_dir.parent
    run(own, folder / "export", "mode=export", f"checkpoint={ended.run_dir}/checkpoints/best")
    weights = load_file(folder / "export" / "export" / "model.safetensors")
    deepcopy(net).load_state_dict(weights)
    begun = run(own, folder / "begun", f"model.init_from={folder}/export/export", "train.steps=1")
    best = ended.summary["best_step"]
    step = run(own, folder / "step", f"train.steps={best + 1}").summary
    assert begun.summary["first_loss"] == pytest.approx(step["final_loss"])


UNKNOWN_METRICS = [
    (["train.monitor=val_qualitie"], "did you mean train.monitor=val_quality"),
    (["train.monitor=val_quality"], "type train.monitor_direction=minimize or train.monitor_direction=maximize"),
    (["callbacks=[early_stop]", "callbacks.early_stop.metric=val_quality"], "type callbacks.early_stop.direction="),
]


@pytest.mark.parametrize("words, said", UNKNOWN_METRICS)
def test_a_metric_without_a_known_name_or_direction_is_refused_before_the_run(own, tmp_path, words, said):
    with pytest.raises(UserError, match=said):
        run(own, tmp_path / "run", *words, loss=Quality())


def test_early_stop_and_best_follow_a_typed_direction(own, tmp_path):
    typed = ["train.monitor=val_quality", "train.monitor_direction=maximize", "callbacks=[early_stop]"]
    result = run(own, tmp_path / "run", *typed, loss=Quality())
    stopped, best = result.summary["steps"], result.summary["best_step"]
    assert stopped == best + 3 < STEPS and best > 1
    state = load(tmp_path / "run" / "checkpoints" / "best")
    assert all(torch.equal(tensor, state[name]) for name, tensor in result.state_dict("best").items())


def test_data_without_a_validation_split_have_nothing_to_stop_by(own, tmp_path):
    net, parts, _ = own
    data = TensorData(*parts[0], valid=0, test=0)
    for word in ("callbacks=[early_stop]", "train.monitor=val_loss", "train.test=best"):
        with pytest.raises(UserError, match="no validation split"):
            run((net, parts, data), tmp_path / word[:9], word)


def test_a_run_that_goes_on_elsewhere_takes_its_best_weights_along_until_another_metric_decides(own, tmp_path):
    run(own, tmp_path / "first", "optim.lr=30", "train.steps=4", "train.keep_checkpoints=1")
    first = load(tmp_path / "first", "best")
    best = int(os.readlink(tmp_path / "first" / "checkpoints" / "best")[-8:])
    assert best < 4, "else this test shows nothing"
    more = ["train.steps=6", f"train.resume={tmp_path}/first", "train.test=best"]
    rest = run(own, tmp_path / "rest", "optim.lr=30", *more)
    assert (rest.summary["best_step"], rest.summary["tested_step"]) == (best, best)
    assert all(torch.equal(tensor, first[name]) for name, tensor in rest.state_dict("best").items())
    other = run(own, tmp_path / "other", "optim.lr=30", *more, "train.monitor=val_accuracy")
    assert other.summary["best_step"] in (5, 6)


DIRECTIONS = [
    ({}, "minimize", False, "minimize"),
    ({"sweep.objective": "val_accuracy"}, "minimize", False, "maximize"),
    ({"train.monitor": "val_accuracy"}, "minimize", False, "maximize"),
    ({"sweep.objective": "val_x", "sweep.direction": "maximize"}, ["minimize"], False, "maximize"),
    ({"sweep.objective": "val_accuracy"}, "minimize", True, "hydra.sweeper.direction=minimize, but"),
    ({"sweep.objective": "val_x"}, "minimize", False, "type sweep.direction="),
]


@pytest.mark.parametrize("words, given, typed, result", DIRECTIONS)
def test_a_sweeper_s_direction_is_that_of_the_objective(words, given, typed, result):
    cfg = OmegaConf.create({"train": {"monitor": None, "monitor_direction": None}, "sweep": {}})
    cfg.sweep = {"objective": None, "direction": None}
    overrides = ["hydra.sweeper.direction=minimize"] * typed
    cfg.hydra = {"sweeper": {"direction": given}, "overrides": {"hydra": overrides}}
    for key, value in words.items():
        OmegaConf.update(cfg, key, value)
    if result in ("minimize", "maximize"):
        set_direction(cfg)
        assert cfg.hydra.sweeper.direction == result
    else:
        with pytest.raises(BaseException, match=result):
            set_direction(cfg)


@pytest.mark.slow
def test_layouts_that_take_turns_keep_the_best_weights_of_a_plain_loop(own, tmp_path):
    """Of layers that a pipeline may cut, in one directory and then in another."""
    _, parts, data = own
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2))
    expected = plain((net, parts, data))
    best = max(expected, key=lambda step: expected[step][1][1])
    assert best < STEPS - 5, "else this test shows nothing"
    words = ["train.monitor=val_accuracy", "train.test=best", "train.keep_checkpoints=1"]
    turns = [("ddp", best - 1, "a"), ("pipelined", best + 1, "a"), ("fsdp", STEPS - 2, "a"), ("ddp", STEPS, "b")]
    for strategy, steps, place in turns:
        more = [f"parallel={strategy}", f"train.steps={steps}"]
        more += ["train.resume=auto" if place == "a" else f"train.resume={tmp_path}/a"]
        more += ["parallel.chunks=2"] * (strategy == "pipelined")
        last = run((net, parts, data), tmp_path / place, *words, *more)
    assert last.run_dir.name == "b" and last.summary["best_step"] == best
    assert last.summary["test_loss"] == pytest.approx(expected[best][2][0])
    torch.testing.assert_close(last.state_dict("best"), dict(expected[best][0]), rtol=1e-9, atol=1e-12)
