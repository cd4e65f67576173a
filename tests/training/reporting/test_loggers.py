"""Several loggers at once: each gets every record, and one that fails costs a warning."""

import csv
import os
import re
import signal
import sqlite3

import numpy as np
import pytest
import torch
from composed import config, records
from composed import run as train

from common.errors import TrainingError
from conf.composition import compose
from launchers.stopping import Stopped
from training import train as command
from training.reporting.loggers import Loggers, scalars, sections
from training.reporting.tensorboard_run import TensorBoardRun
from training.run import loop
from training.run.prepare import prepare

SHORT = ["train.epochs=null", "train.steps=3"]


def test_loggers_are_a_list_and_each_further_one_has_a_section_of_its_own():
    cfg = compose(["logger=[wandb,tensorboard,csv]", "logger.mode=online", "loggers.csv.file=x.csv"])
    assert cfg.logger.mode == "online" and set(cfg.loggers) == {"tensorboard", "csv"}
    assert [section._target_.rpartition(".")[2] for section in sections(cfg).values()] == [
        "WandbRun", "TensorBoardRun", "CsvLogger",
    ]  # fmt: skip
    assert [s._target_ for s in sections(compose(["logger=[csv]"])).values()] == ["training.reporting.CsvLogger"]


def test_the_console_names_them_and_callbacks_as_they_were_typed(tmp_path, capfd):
    lists = [
        "logger=[none,csv]", "loggers.csv.file=x.csv", "callbacks=[gradient_histogram,early_stop]",
        "callbacks.early_stop.patience=7",
    ]  # fmt: skip
    command(*SHORT, *lists, "debug=limit", "device=cpu", "parallel.threads=1", f"hydra.run.dir={tmp_path}/run")
    said = capfd.readouterr().out
    header = said.partition("\n\n")[0].split()
    assert {*lists, "debug=limit", "train.steps=3"} <= set(header) and "_target_" not in said
    for word, kept in {"evaluate:": lists[:2], "continue:": lists}.items():
        (line,) = [line for line in said.splitlines() if line.startswith(word)]
        assert set(re.findall(r'"([^"]*)"', line)) & set(lists) == set(kept)


def test_the_csv_has_a_line_per_step_with_the_evaluation_after_it(tmp_path):
    train(tmp_path, *SHORT, "train.eval_every=2", "logger=csv")
    lines = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [line["step"] for line in lines] == ["1", "2", "3"]
    assert [float(line["loss"]) for line in lines] == [r["loss"] for r in records(tmp_path) if "loss" in r]
    assert [bool(line["val_loss"]) for line in lines] == [False, True, True]


def fail(*args, **kwargs):
    raise OSError("no space")


@pytest.mark.parametrize("where", ["__init__", "log", "finish"])
def test_each_gets_a_record_of_its_own_and_one_that_fails_is_warned_about_once(caplog, where):
    seen = []
    Broken = type("Broken", (), {"log": lambda *_: None, "finish": lambda *_, **__: None, where: fail})

    class Greedy:
        def log(self, record, step):
            seen.append(record.pop("loss"))

        def finish(self, summary=None, exit_code=0):
            seen.append(summary["stages"].pop())

    kinds = {"Broken": Broken, "Greedy": Greedy}
    named = {str(place): {"_target_": name} for place, name in enumerate(("Greedy", "Broken", "Greedy"))}
    several = Loggers(named, lambda place, section: kinds[section["_target_"]]())
    for step in (1, 2):
        several.log({"loss": 1.0 * step}, step)
    several.finish({"stages": ["a"]})
    assert seen == [1.0, 1.0, 2.0, 2.0, "a", "a"]
    (warning,) = caplog.records
    assert warning.getMessage().startswith("Broken failed (OSError: no space). Training goes on without it")


def test_a_package_that_is_not_installed_is_missed_before_the_run(monkeypatch):
    monkeypatch.setattr("conf.instantiate.find_spec", lambda name: None)
    packages = {"tensorboard": "tensorboard", "mlflow": "mlflow-skinny", "trackio": "trackio"}
    for name, package in packages.items():
        with pytest.raises(TrainingError, match=f"pip install {package}"):
            prepare(config(f"logger={name}"))


def test_tensorboard_shows_grouped_numbers_and_histograms(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    histogram = "callbacks=[{_target_: training.callbacks.gradient_histogram.GradientHistogram}]"
    train(tmp_path, *SHORT, "logger=tensorboard", histogram)
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"histograms": 0}).Reload()
    assert {"train/loss", "train/lr", "val/loss"} <= set(events.Tags()["scalars"])
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(r["step"], pytest.approx(r["loss"])) for r in records(tmp_path) if "loss" in r]
    (counts,) = events.Histograms("gradients/net1.weight")
    assert sum(counts.histogram_value.bucket) == 100


def test_loggers_of_numbers_leave_out_what_is_none():
    record = {"step": 1, "loss": torch.tensor(2.0), "val_loss": np.float32(3), "a": None, "b": [1.0, 2.0], "c": "d"}
    assert scalars(record) == {"train/loss": 2.0, "val/loss": 3.0}


def test_tensorboard_shows_each_number_once_after_a_resumption_that_begins_with_an_evaluation(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def stopped(*_):
        raise Stopped("in an evaluation")

    words = [*SHORT, "train.eval_every=2", "logger=tensorboard"]
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(loop, "evaluate_split", stopped)
        train(tmp_path, *words)
    train(tmp_path, *words, "train.resume=auto")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = {name: [event.step for event in events.Scalars(name)] for name in ("train/loss", "val/loss")}
    assert shown == {"train/loss": [1, 2, 3], "val/loss": [2, 3]}


def test_tensorboard_has_what_a_process_had_logged_when_it_was_killed(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if (child := os.fork()) == 0:
        run = TensorBoardRun(tmp_path, {}, "run")
        for step in range(1, 9):
            run.log({"step": step, "loss": 1.0 / step, "lr": 0.5}, step)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in ("train/loss", "train/lr"):
        assert [event.step for event in events.Scalars(name)] == list(range(1, 9))


def test_mlflow_has_the_numbers_of_the_training_that_went_back_to_a_checkpoint(tmp_path, caplog):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow-skinny")
    words = [*SHORT, "logger=mlflow", "train.checkpoint_every=2", "train.eval_every=1", "train.keep_checkpoints=9"]
    words += ["train.steps=6", "optim.lr=0.05"]
    train(tmp_path, *words)
    first = (tmp_path / "mlflow_id.txt").read_text().strip()
    train(tmp_path, *words, f"train.resume='{tmp_path}/checkpoints/step-00000002'", "optim.lr=0.5")
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (experiment,) = [one for one in client.search_experiments() if one.name == "one-word-parallel"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and client.get_run(first).info.lifecycle_stage == "deleted"
    assert "takes its place" in caplog.text
    assert run.data.params["optim.lr"] == "0.5" and client.get_run(first).data.params["optim.lr"] == "0.05"
    for key, name in (("loss", "train/loss"), ("lr", "train/lr"), ("val_loss", "val/loss")):
        shown = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        assert shown == [(r["step"], pytest.approx(r[key])) for r in records(tmp_path) if key in r], name
    (tested,) = client.get_metric_history(run.info.run_id, "summary/test_loss")
    assert tested.step == 6


def test_mlflow_gets_what_it_lacks_when_a_training_is_resumed(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow-skinny")
    words = [*SHORT, "train.checkpoint_every=2", "train.eval_every=1"]
    train(tmp_path, *words, "logger=mlflow")
    run = (tmp_path / "mlflow_id.txt").read_text().strip()
    train(tmp_path, *words, "logger=none", "train.resume=auto", "train.steps=4")
    train(tmp_path, *words, "logger=mlflow", "train.resume=auto", "train.steps=5")
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    assert (tmp_path / "mlflow_id.txt").read_text().strip() == run
    history = client.get_metric_history(run, "val/loss")
    assert [(m.step, m.value) for m in history] == [
        (r["step"], pytest.approx(r["val_loss"])) for r in records(tmp_path) if "val_loss" in r
    ]
    assert len(history) == 5


def test_mlflow_has_parameters_and_one_run_with_each_number_once_for_a_resumed_training(tmp_path, monkeypatch):
    def fail():
        raise OSError("lost")

    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow-skinny")
    words = [*SHORT, "logger=mlflow", "train.checkpoint_every=2", "train.eval_every=1"]
    with monkeypatch.context() as patch, pytest.raises(OSError):  # logs step 3 and loses it
        patch.setattr(loop.Loop, "_is_best", lambda loop: loop.outcome.steps == 3 and fail())
        train(tmp_path, *words)
    train(tmp_path, *words, "train.resume=auto", "train.steps=4")
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())  # which the logger has allowed
    (experiment,) = [one for one in client.search_experiments() if one.name == "one-word-parallel"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.data.params["model.name"], run.info.status) == ("toy", "FINISHED")
    shown = sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss"))
    assert shown == [(r["step"], pytest.approx(r["loss"])) for r in records(tmp_path) if "loss" in r]
    for name in run.data.metrics:
        steps = [point.step for point in client.get_metric_history(run.info.run_id, name)]
        assert len(steps) == len(set(steps)), name


@pytest.mark.slow  # importing it takes seconds
def test_trackio_has_one_run_with_each_number_once_for_a_resumed_training(tmp_path, monkeypatch, capfd):
    def fail():
        raise OSError("lost")

    pytest.importorskip("trackio", reason="needs trackio: pip install trackio")
    from trackio.sqlite_storage import SQLiteStorage

    for module in ("utils", "sqlite_storage"):
        monkeypatch.setattr(f"trackio.{module}.TRACKIO_DIR", tmp_path / "trackio")
    run_dir, words = tmp_path / "run", [*SHORT, "logger=trackio", "train.checkpoint_every=2", "train.eval_every=1"]
    with monkeypatch.context() as patch, pytest.raises(OSError):  # logs step 3 and loses it
        patch.setattr(loop.Loop, "_is_best", lambda loop: loop.outcome.steps == 3 and fail())
        train(run_dir, *words)
    database = sqlite3.connect(SQLiteStorage.get_project_db_path("one-word-parallel"))
    database.execute("DELETE FROM metrics WHERE step = 2")  # as if the process had been killed before it wrote them
    database.commit()
    another = ["train.resume=auto", "train.steps=4", "optim.lr=0.001"]  # step 3 has other numbers now
    another += ["parallel=model_parallel"]  # which names runs
    train(run_dir, *words, *another)
    train(run_dir, *words, *another)  # has nothing left to do
    (name,) = (run["name"] for run in SQLiteStorage.get_run_records("one-word-parallel"))
    rows = SQLiteStorage.get_logs("one-word-parallel", name)
    for kind, key in (("train/loss", "loss"), ("val/loss", "val_loss")):
        shown = sorted((row["step"], row[kind]) for row in rows if kind in row)
        assert shown == [(r["step"], pytest.approx(r[key])) for r in records(run_dir) if key in r]
    (summary,) = (row for row in rows if "summary/test_loss" in row)
    assert summary["step"] == summary["summary/steps"] == 4
    assert (SQLiteStorage.get_run_config("one-word-parallel", name) or {})["model"]["name"] == "toy"
    assert "trackio" not in capfd.readouterr().out.lower().replace(str(tmp_path).lower(), "")
