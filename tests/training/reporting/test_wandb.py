"""wandb: offline runs that are read back, and uploaded once however often they were killed; failures stay its own."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from wandb_server import serving

from training.reporting import WandbRun
from training.reporting.environment import git_state
from training.reporting.metrics import METRICS, MetricsFile, truncate_after

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


def wandb_says(run_dir, *words):
    words = [sys.executable, "-m", "wandb", *words]
    return subprocess.run(words, cwd=run_dir, capture_output=True, text=True, check=True, timeout=60)


def read_back(run_dir):
    """All records of the offline runs in `run_dir`, oldest run first."""
    found = []
    for file in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        found += [
            json.loads(line) for line in wandb_says(run_dir, "leet", "inspect", "--json", str(file)).stdout.splitlines()
        ]
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
    files = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(run_dir)], cwd=ROOT, timeout=60, **files)
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


@pytest.mark.slow
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


# -- `wandb sync` of a run that was killed and resumed, to a server on this machine that counts rows -------------------


@pytest.fixture
def uploaded(monkeypatch):
    with serving() as (rows, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield rows


def sync(run_dir):
    done = wandb_says(run_dir, "sync", *sorted(run_dir.glob("wandb/offline-run-*")))
    assert "ERROR" not in done.stderr, done.stderr


def numbers(step):
    yield {"step": step, "loss": 1 / step, "padding": "x" * 200}
    if step % 5 == 0:
        yield {"step": step, "val_loss": 2 / step}


def log_steps(run_dir, steps, run):
    metrics = MetricsFile(run_dir / METRICS)
    for step in steps:
        for record in numbers(step):
            metrics.write(record)
            run.log(record, step)


RESUMED = """
import os, sys, time
from pathlib import Path
import psutil
sys.path[:0] = [here := os.path.dirname(sys.argv[1]), os.path.dirname(here)]
from test_wandb import WandbRun, log_steps
folder, first, last = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
log_steps(folder, range(first, last + 1), WandbRun(folder, {}))
file, = folder.glob("wandb/latest-run/*.wandb")
deadline = time.monotonic() + 10
while last - first > 100 and file.stat().st_size < 1 << 16 and time.monotonic() < deadline:
    time.sleep(0.05)
for process in [*psutil.Process().children(recursive=True), psutil.Process()]:
    process.kill()
"""


KILLS = [
    pytest.param([(1, 200)], 150, id="it logs steps again that it had logged before"),
    pytest.param([(1, 20)], 10, id="it had written nothing when it was killed", marks=pytest.mark.slow),
    pytest.param([(1, 200), (151, 160), (156, 300)], 155, id="more than once", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("killed", "resumed_after"), KILLS)
def test_a_killed_and_resumed_run_is_uploaded_with_each_step_once(tmp_path, uploaded, killed, resumed_after):
    run_dir = tmp_path / "run"
    for first, last in killed:
        truncate_after(run_dir / METRICS, first - 1)
        script = [sys.executable, "-c", RESUMED, __file__, run_dir, str(first), str(last)]
        assert subprocess.run(script, cwd=ROOT, timeout=60).returncode == -9
    truncate_after(run_dir / METRICS, resumed_after)
    last = killed[-1][1] + 20
    run = WandbRun(run_dir, {})
    log_steps(run_dir, range(resumed_after + 1, last + 1), run)
    run.finish({})
    name = (run_dir / "wandb_id.txt").read_text().strip()
    # Of those that begin in one second, the folder is the same.
    assert {f"-{name}" in path.name for path in run_dir.glob("wandb/offline-run-*")} == {True}
    for _ in range(2):
        sync(run_dir)
        assert Counter(row["_step"] for row in uploaded) == dict.fromkeys(range(1, last + 1), 1)
    for row in uploaded:
        expected = {name: value for record in numbers(row["_step"]) for name, value in record.items()}
        assert row["train/loss"] == pytest.approx(expected["loss"])
        assert row.get("val/loss") == expected.get("val_loss")


@pytest.mark.slow
def test_steps_that_are_uploaded_before_a_run_is_resumed_are_not_uploaded_again(tmp_path, uploaded):
    run = WandbRun(tmp_path, {})
    log_steps(tmp_path, range(1, 9), run)
    run.finish(exit_code=1)
    sync(tmp_path)
    truncate_after(tmp_path / METRICS, 5)
    run = WandbRun(tmp_path, {})
    log_steps(tmp_path, range(6, 13), run)
    run.finish({})
    sync(tmp_path)
    assert Counter(row["_step"] for row in uploaded) == dict.fromkeys(range(1, 13), 1)


@pytest.mark.parametrize("lost, back", [(0, 5), (3, 8)], ids=["a return to step 5", "the kill lost 3 steps"])
def test_an_online_run_says_which_steps_keep_their_first_numbers_and_gets_those_it_lacks(
    tmp_path, uploaded, caplog, lost, back
):
    log_steps(tmp_path, range(1, 9), run := WandbRun(tmp_path, {}, mode="online"))
    run.finish({})
    del uploaded[8 - lost :]
    truncate_after(tmp_path / METRICS, back)
    log_steps(tmp_path, range(back + 1, 11), run := WandbRun(tmp_path, {}, mode="online"))
    run.finish({})
    assert [row["_step"] for row in uploaded] == list(range(1, 11))
    assert [row["train/loss"] for row in uploaded] == pytest.approx([1 / step for step in range(1, 11)])
    assert ("If steps 6 to 8 get other results now" in caplog.text) == (back == 5)
