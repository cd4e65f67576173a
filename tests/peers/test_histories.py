"""The histories of a training by the readers of TensorBoard, wandb, MLflow and Trackio: each step once, also after
two kills, and after a return to an earlier checkpoint in another layout."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import train
from wandb_server import serving

pytestmark = pytest.mark.peers
NAMES = {"train/loss": "loss", "val/loss": "val_loss"}
KILLS = """
import os, signal

class Kills:
    def __init__(self, run_dir, run_config, run_name, after):
        self.after = after

    def log(self, record, step):
        if "loss" in record and step == self.after:
            os.kill(os.getpid(), signal.SIGKILL)

    def finish(self, summary=None, exit_code=0):
        pass
"""


def of_csv(folder: Path) -> dict:
    lines = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    return {name: [(int(line["step"]), float(line[key])) for line in lines if line[key]] for name, key in NAMES.items()}


def of_tensorboard(folder: Path) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0}).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in NAMES}


def of_mlflow(folder: Path, uri: str) -> dict:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (experiment,) = [one for one in client.search_experiments() if one.name == "one-word-parallel"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    points = {name: client.get_metric_history(run.info.run_id, name) for name in NAMES}
    return {name: [(point.step, point.value) for point in found] for name, found in points.items()}


def of_trackio(store: Path) -> dict:
    """In a process of its own: trackio reads TRACKIO_DIR when it is imported."""
    program = """
import json
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("one-word-parallel")
print(json.dumps(SQLiteStorage.get_logs("one-word-parallel", name)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"TRACKIO_DIR": str(store)}, capture_output=True, text=True,
        check=True, timeout=120,
    )  # fmt: skip
    rows = json.loads(done.stdout.splitlines()[-1])
    return {name: [(row["step"], row[name]) for row in rows if name in row] for name in NAMES}


def of_wandb(folder: Path) -> dict:
    """What ``wandb sync`` sends of all parts."""
    with serving() as (rows, environment):
        parts = sorted(folder.glob("wandb/offline-run-*"))
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", *parts], env=os.environ | environment, cwd=folder,
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
    assert "ERROR" not in done.stderr
    for marker in folder.glob("wandb/offline-run-*/*.synced"):
        marker.unlink()  # what is uploaded cannot be cut off
    return {name: [(row["_step"], row[name]) for row in rows if name in row] for name in NAMES}


def of_metrics(records: list[dict]) -> dict:
    return {name: [(line["step"], line[key]) for line in records if key in line] for name, key in NAMES.items()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "killed, kills, other, store",
    [
        ("parallel=single", (7, 9), "parallel=ddp parallel.dp=2", "files"),
        ("parallel=ddp parallel.dp=2", (6, 5), "parallel=single", "sqlite"),  # 6: before the checkpoint of its step
    ],
)
def test_each_program_has_each_step_once_after_two_kills_and_after_a_return(
    tmp_path, monkeypatch, killed, kills, other, store
):
    for package in ("tensorboard", "mlflow", "trackio", "wandb"):
        pytest.importorskip(package, reason=f"needs {package}: pip install -r requirements-peers.txt")
    if store == "sqlite":
        pytest.importorskip("alembic", reason="needs sqlalchemy and alembic: pip install -r requirements-peers.txt")
    run, home = tmp_path / "run", tmp_path / "home"
    home.mkdir()
    (tmp_path / "kills.py").write_text(KILLS)
    uri = f"sqlite:///{tmp_path}/mlflow.db" if store == "sqlite" else (run / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # as the logger does
    monkeypatch.setenv("HOME", str(home))
    env = {"PYTHONPATH": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(home)}
    common = ["model=toy", "device=cpu", "parallel.threads=1", "train.epochs=null", "train.eval_every=2"]
    rhythm = ["train.checkpoint_every=2", "train.keep_checkpoints=9"]
    logged = [*common, *rhythm, "logger=[csv,tensorboard,mlflow,trackio,wandb]", f"loggers.mlflow.tracking_uri='{uri}'"]

    def of_all() -> dict[str, dict]:
        return {
            "csv": of_csv(run), "tensorboard": of_tensorboard(run), "mlflow": of_mlflow(run, uri),
            "trackio": of_trackio(tmp_path / "trackio"), "wandb": of_wandb(run),
        }  # fmt: skip

    whole = train([*common, "train.steps=10", "logger=none", "parallel=single"], tmp_path / "whole", fresh=True)
    wanted = of_metrics(whole.metrics)
    line = [*logged, "train.steps=10", "train.resume=auto", *killed.split()]
    for after in kills:
        kill = f"+loggers.killer={{_target_: kills.Kills, after: {after}}}"
        died = train([*line, kill], run, env=env, fresh=True)
        assert died.code != 0 and not (run / "summary.json").exists(), died.console
    resumed = train(line, run, env=env, fresh=True)
    assert resumed.code == 0, resumed.console
    for name, shown in {"metrics.jsonl": of_metrics(resumed.metrics), **of_all()}.items():
        assert [step for step, _ in shown["train/loss"]] == list(range(1, 11)), name
        assert [step for step, _ in shown["val/loss"]] == [2, 4, 6, 8, 10], name
        for key in NAMES:
            assert [x for _, x in shown[key]] == pytest.approx([x for _, x in wanted[key]], rel=1e-5), (name, key)

    back = [f"train.resume='{run}/checkpoints/step-00000004'", "train.steps=12", "optim.lr=0.5", *other.split()]
    returned = train([*logged, *back], run, env=env, fresh=True)
    assert returned.code == 0, returned.console
    again = of_metrics(returned.metrics)
    assert dict(again["train/loss"][:5]) == pytest.approx(dict(wanted["train/loss"][:5]), rel=1e-5)
    assert abs(again["train/loss"][9][1] - wanted["train/loss"][9][1]) > 0.1, "another rate, other results"
    for name, shown in of_all().items():
        assert [step for step, _ in shown["train/loss"]] == list(range(1, 13)), name
        for key in NAMES:
            assert dict(shown[key]) == pytest.approx(dict(again[key]), rel=1e-6), (name, key)
