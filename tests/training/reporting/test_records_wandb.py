"""wandb: an offline run that can be read back, and failures that never reach the training."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.reporting import WandbRun
from training.reporting.environment import git_state

wandb = pytest.importorskip("wandb")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """No account, no settings: the tests must neither use nor touch the developer's own."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    yield home
    wandb.teardown()


def read_back(run_dir):
    """All records of the offline runs in `run_dir`, oldest run first."""
    found = []
    for file in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        shown = subprocess.run(
            [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        found += [json.loads(line) for line in shown.stdout.splitlines()]
    return found


def losses(run_dir):
    items = [record["history"]["item"] for record in read_back(run_dir) if record["type"] == "history"]
    return {item["_step"]: item["train/loss"] for item in items if "train/loss" in item}


SCRIPT = """
import os, signal, sys
import wandb
from training.reporting import WandbRun
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
before = dict(os.environ)
config = {"lr": 0.5, "hub": {"api_key": "abcdefgh12345678"}}
run = WandbRun(sys.argv[1], config, "first", project="tests", tags=["t"])
for step in range(1, 6):
    run.log({"step": step, "loss": 1 / step, "top3_accuracy": 0.75}, step)
run.log({"step": 5, "val_loss": 2.5, "val_top3_accuracy": 0.5}, 5)
assert not wandb.run.settings.x_disable_stats, "the machine's load is recorded"
assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
assert before == dict(os.environ)
run.finish({"final_loss": 0.2})
"""


def test_an_offline_run_is_silent_stays_in_its_folder_and_can_be_read_back(tmp_path, home):
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run_dir)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert losses(run_dir) == {step: pytest.approx(1 / step) for step in range(1, 6)}
    found = read_back(run_dir)
    (record,) = [record["run"] for record in found if record["type"] == "run"]
    assert record.get("git", {}).get("commit") == git_state()[0]
    text = json.dumps(found)
    assert '"train/top3_accuracy": 0.75' in text and '"val/top3_accuracy": 0.5' in text
    assert '"val/loss": 2.5' in text and '"final_loss": 0.2' in text and '"lr": 0.5' in text
    assert "abcdefgh12345678" not in text
    assert '"host"' not in text
    assert sorted(os.listdir(run_dir)) == ["wandb", "wandb_id.txt"]
    assert not [file for file in home.rglob("*") if file.is_file()]


def test_a_resumed_training_continues_the_same_run(tmp_path):
    for step in (1, 2):
        run = WandbRun(tmp_path, {})
        run.log({"loss": float(step)}, step)
        run.finish()
    assert losses(tmp_path) == {1: 1.0, 2: 2.0}
    ids = {record["run"]["run_id"] for record in read_back(tmp_path) if record["type"] == "run"}
    assert ids == {(tmp_path / "wandb_id.txt").read_text().strip()}


KILLED = """
import sys, time, psutil
from training.reporting import WandbRun
from training.reporting.loggers import Loggers
both = Loggers({"logger": None}, lambda *_: WandbRun(sys.argv[1], {}, finish_timeout_s=2))
both.log({"loss": 1.0}, 1)
service, = [child for child in psutil.Process().children() if "wandb-core" in child.name()]
service.kill()
for step in (2, 3):
    both.log({"loss": 1.0}, step)
    time.sleep(0.1)
both.finish()
"""


def test_a_service_that_is_killed_costs_one_warning_and_nothing_else(tmp_path):
    pytest.importorskip("psutil")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and done.stdout == ""
    (said,) = done.stderr.splitlines()
    assert said.startswith("WandbRun failed (") and said.endswith(
        "). Training goes on without it; metrics.jsonl has every number"
    )


def test_without_a_key_or_an_answer_an_online_run_becomes_an_offline_one(tmp_path, monkeypatch, caplog, capfd):
    WandbRun(tmp_path / "without a key", {}, mode="online").finish()
    assert "wandb login" in caplog.text and [*tmp_path.glob("without a key/wandb/offline-run-*")]
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    started = time.monotonic()
    run = WandbRun(tmp_path, {}, mode="online", init_timeout_s=2)
    assert time.monotonic() - started < 60
    run.log({"loss": 0.5}, 1)
    run.finish()
    assert losses(tmp_path) == {1: 0.5}
    assert "logs offline instead" in caplog.text and "wandb sync" in caplog.text
    assert "a" * 40 not in caplog.text + "".join(capfd.readouterr())
