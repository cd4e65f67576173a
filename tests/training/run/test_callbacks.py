"""Callbacks: what they are told, that they may end a run, and that a resumed run continues theirs."""

import json
import math
import re
import sys
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from commandline import ROOT
from composed import config, records, run_layout, saved, training
from composed import run as train
from hydra.experimental.callback import Callback

from common.errors import TrainingError
from conf.instantiate import add_to_path, with_values
from launchers.stopping import Stopped
from training.callbacks.early_stop import EarlyStop
from training.callbacks.gradient_histogram import GradientHistogram
from training.command.app import run_words
from training.run import loop

SHORT = ["train.epochs=null", "train.steps=8"]
OWN = """
from pathlib import Path

class Diary:
    def __init__(self, file):
        self.file = Path(file)

    def on_step(self, run, record):
        self._note(f"step {run.step} {record.pop('loss') > 0}")

    def on_evaluation(self, run, record):
        self._note(f"evaluation {sorted(record)}")

    def on_checkpoint(self, run, path):
        self._note(f"checkpoint {path.name}")

    def on_end(self, run, summary):
        run.record({"step": run.step, "diary": 1.0})
        self._note(f"end {summary['steps']}")

    def _note(self, line):
        with open(self.file, "a") as file:
            print(line, file=file)
"""


def test_an_own_callback_is_told_of_steps_evaluations_checkpoints_and_the_end(tmp_path, monkeypatch):
    (tmp_path / "my_callbacks.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    add_to_path([str(tmp_path)])
    own = f"{{_target_: my_callbacks.Diary, file: {tmp_path}/diary.txt}}"
    twice = f"callbacks=[{own},{own}]"  # each may change the record that it is given
    train(tmp_path / "run", twice, f"import_from=[{tmp_path}]", "train.epochs=null", "train.steps=2")
    assert (tmp_path / "diary.txt").read_text().splitlines()[::2] == [
        "step 1 True",
        "step 2 True",
        "evaluation ['step', 'val_loss']",
        "checkpoint step-00000002",
        "end 2",
    ]
    assert records(tmp_path / "run")[-1] == {"step": 2, "diary": 1.0}


class Leaving:
    def __init__(self, code):
        self.code = code

    def on_step(self, run, record):
        sys.exit(self.code)


@pytest.mark.parametrize("code", [None, 3])
def test_a_callback_that_leaves_by_sys_exit_fails_the_run_whatever_its_code(tmp_path, code):
    cfg = with_values(config(*SHORT), {"callbacks": [{"_target_": f"{__name__}.Leaving", "code": code}]})
    with pytest.raises(
        TrainingError, match=r"sys.exit\(\) was called in .*test_callbacks.py, line \d+; .*run.stop\(reason\)"
    ):
        training(cfg, tmp_path)
    assert not (tmp_path / "summary.json").exists()


class Freezing:
    def on_step(self, run, record):
        if record["step"] == 2:
            next(run.strategy.parameters()).requires_grad_(False)


def test_a_callback_that_changes_what_is_trained_is_refused_at_its_step(tmp_path):
    cfg = with_values(config(*SHORT), {"callbacks": [{"_target_": f"{__name__}.Freezing"}]})
    with pytest.raises(TrainingError, match=r"step 2: callbacks.0 has changed requires_grad of net1.*train.unfreeze"):
        training(cfg, tmp_path)


def early_stop(*overrides):
    cfg = config(*SHORT, "train.eval_every=1", "optim.lr=1e-12", *overrides)
    stop = {"early_stop": {"_target_": "training.callbacks.early_stop.EarlyStop", "min_delta": 0.1}}
    return with_values(cfg, {"callbacks": stop})


def test_a_run_that_early_stop_has_ended_stays_ended_until_it_is_to_be_longer(tmp_path):
    ended = training(early_stop(), tmp_path)
    assert ended["steps"] == 4, "one evaluation to begin with, and three that are no better"
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-00000004"
    assert training(early_stop("train.resume=auto"), tmp_path) == ended and ended["test_loss"] is not None
    (tmp_path / "summary.json").unlink()
    assert training(early_stop("train.resume=auto"), tmp_path)["test_loss"] == ended["test_loss"]
    assert [line["step"] for line in records(tmp_path) if "loss" in line] == [1, 2, 3, 4]
    assert training(early_stop("train.resume=auto", "train.steps=9"), tmp_path)["steps"] == 5


def skip(monkeypatch, *steps):
    """Skip these steps, as if their numbers were not finite."""
    judge = loop.Skipping.judge

    def judged(skipping, step, result, *others):
        return judge(skipping, step, replace(result, loss=math.nan) if step in steps else result, *others)

    monkeypatch.setattr(loop.Skipping, "judge", judged)


def test_an_evaluation_after_a_skipped_step_counts_once_though_it_is_repeated(tmp_path, monkeypatch):
    skip(monkeypatch, 3)
    training(early_stop("train.steps=3"), tmp_path)
    latest = (tmp_path / "checkpoints" / "latest").resolve()
    progress = json.loads((latest / "manifest.json").read_text())["progress"]
    assert latest.name == "step-00000002" and progress["callbacks"]["early_stop"]["since"] == 1
    assert training(early_stop("train.resume=auto"), tmp_path)["steps"] == 4


def test_a_run_that_early_stop_has_ended_at_a_skipped_step_stays_as_it_is(tmp_path, monkeypatch):
    skip(monkeypatch, 4)
    ended, written = training(early_stop(), tmp_path), records(tmp_path)
    assert (ended["steps"], ended["skipped_steps"]) == (4, 1)
    for _ in range(2):
        assert training(early_stop("train.resume=auto"), tmp_path) == ended and records(tmp_path) == written
    (tmp_path / "summary.json").unlink()
    again = training(early_stop("train.resume=auto"), tmp_path)
    assert (again["steps"], again["skipped_steps"]) == (4, 1) and records(tmp_path) == written
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-00000003"


def test_a_run_that_the_evaluation_owed_at_its_resumption_has_ended_stays_ended(tmp_path, monkeypatch):
    def stopped(*_):
        raise Stopped("in an evaluation")

    training(early_stop("train.steps=3"), tmp_path)
    (tmp_path / "summary.json").unlink()
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(loop, "evaluate_split", stopped)
        training(early_stop("train.resume=auto"), tmp_path)
    for _ in range(2):
        assert training(early_stop("train.resume=auto"), tmp_path)["steps"] == 4
    assert [line["step"] for line in records(tmp_path) if "val_loss" in line] == [1, 2, 3, 4]


def test_evaluations_that_are_not_finite_are_counted_across_a_resumption():
    reasons, state = [], ""
    run = SimpleNamespace(stop=reasons.append, cfg=config(), evaluation="the same")
    for attempt in range(3):
        stop = EarlyStop(patience=3)
        if attempt:
            stop.load_state_dict(json.loads(state))
        stop.on_evaluation(run, {"val_loss": math.nan})
        state = json.dumps(stop.state_dict(), allow_nan=False)
        assert len(reasons) == (attempt == 2)


def test_the_best_result_of_another_metric_is_not_compared_with():
    accuracy, reasons = EarlyStop(metric="val_accuracy", patience=1), []
    run = SimpleNamespace(stop=reasons.append, cfg=config(), evaluation="the same")
    accuracy.on_evaluation(run, {"val_accuracy": 0.9})
    loss = EarlyStop(patience=1)
    loss.load_state_dict(accuracy.state_dict())
    for value in (0.8, 0.7):
        loss.on_evaluation(run, {"val_loss": value})
    assert reasons == []
    for value in (0.95, 0.94):
        accuracy.on_evaluation(run, {"val_accuracy": value})
    assert reasons == ["val_accuracy has not been better than 0.95 for 1 evaluations"]


def test_more_bins_than_wandb_accepts_are_refused():
    assert GradientHistogram(bins=512)
    with pytest.raises(TrainingError, match="bins=513 from 1 to 512"):
        GradientHistogram(bins=513)


@pytest.fixture
def folders(ranks, tmp_path):
    """``folders(names, words, callbacks=…)``: the run directory of the same training in each of these layouts."""

    def begin(names, words, **sections):
        return {name: run_layout(ranks, name, tmp_path / name, *SHORT, *words, **sections) for name in names}

    return begin


@pytest.mark.slow
def test_gradients_of_all_stages_are_counted_once_and_alike_in_every_layout(folders, tmp_path):
    section = {"histogram": {"_target_": "training.callbacks.gradient_histogram.GradientHistogram", "every": 2}}
    found = {}
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "gradients.jsonl").write_text('{"step": 5}\n')  # of steps that are computed again
    for layout, folder in folders(("single", "pipe_ddp", "pipe_fsdp"), ["train.steps=3"], callbacks=section).items():
        lines = map(json.loads, open(folder / "gradients.jsonl"))
        found[layout] = {(line["step"], line["name"]): line for line in lines}
    names = [f"{layer}.{kind}" for layer in ("net1", "net2") for kind in ("weight", "bias")]
    for one in found.values():
        assert one.keys() == {(step, name) for step in (1, 3) for name in names}
        for key, line in found["single"].items():
            assert sum(one[key]["counts"]) == sum(line["counts"])
            assert one[key]["edges"] == pytest.approx(line["edges"], rel=1e-4, abs=1e-7)


def test_the_norm_of_the_weights_is_the_same_in_every_layout(folders, tmp_path):
    """By the callback of docs/extending.md, of a model with tied weights."""
    page = (ROOT / "docs" / "extending.md").read_text()
    (tmp_path / "weight_norm.py").write_text(re.search(r"weight_norm.py`:\n\n```python\n(.*?)```", page, re.S)[1])
    (tmp_path / "text.txt").write_text("the cat and the dog saw the bird and the bird saw the cat\n" * 200)
    words = [
        "model=gpt2", "data.vocabulary=words", "model.vocab_size=64", "model.n_layer=2", "model.n_head=2",
        "model.n_embd=16", "optim=sgd",
        "data=text", f"data.root={tmp_path}/text.txt", f"data.cache_dir={tmp_path}/cache", "data.seq_len=16",
        "train.steps=2", "train.global_batch_size=8", "train.precision=fp32", "train.eval_every=1",
        "callbacks=[{_target_: weight_norm.WeightNorm}]", f"import_from=[{tmp_path}]",
    ]  # fmt: skip
    found = {}
    for layout, folder in folders(("single", "pipe_fsdp"), words).items():
        found[layout] = [record["weight_norm"] for record in records(folder) if "weight_norm" in record]
    weights = saved(tmp_path / "single", 2)
    assert found["single"][-1] == pytest.approx(sum(w.double().square().sum().item() for w in weights.values()) ** 0.5)
    for layout, norms in found.items():
        assert norms == pytest.approx(found["single"], rel=1e-6), layout


class OfHydra(Callback):
    told = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            OfHydra.told.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("words, kind", [((), "run"), (("-m",), "multirun")])
def test_a_callback_of_hydra_is_told_of_the_start_and_the_end(words, kind, tmp_path):
    OfHydra.told.clear()
    where = [f"hydra.{key}.dir={tmp_path}/{key}" for key in ("run", "sweep")]
    callback = f"+hydra.callbacks.own._target_={__name__}.OfHydra"
    with suppress(SystemExit):  # a sweep's, as its job has no record
        run_words([*words, *SHORT, "logger=none", *where, callback], lambda composed: OfHydra.told.append("run"))
    told = [name for name in OfHydra.told if name.startswith(("run", "on_run", "on_multirun"))]
    assert told == [f"on_{kind}_start", "run", f"on_{kind}_end"]
