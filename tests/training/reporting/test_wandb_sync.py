"""``wandb sync`` of a run that was killed and resumed, to a server on this machine that counts rows."""

import gzip
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from training.reporting import WandbRun
from training.reporting.metrics import METRICS, MetricsFile

wandb = pytest.importorskip("wandb")

ROOT = Path(__file__).resolve().parents[3]


class Server(BaseHTTPRequestHandler):
    """Answers what ``wandb sync`` 0.31 asks, and keeps the rows that it sends."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        answer, sent = {}, {}
        with suppress(ValueError):  # reports about wandb itself
            sent = json.loads(body)
        if "UpsertBucket" in sent.get("query", ""):
            project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
            bucket = {"id": "b", "name": sent["variables"]["name"], "displayName": "b", "config": "{}"}
            bucket |= {"project": project, "historyLineCount": len(self.server.rows)}
            answer = {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        elif "CreateRunFiles" in sent.get("query", ""):
            answer = {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}}
        elif "query" in sent:
            answer = {"data": {"viewer": {"id": "v", "entity": "e", "username": "v", "flags": "{}"}}}
        elif "file_stream" in self.path:
            history = sent.get("files", {}).get("wandb-history.jsonl", {"content": []})
            self.server.rows += [json.loads(line) for line in history["content"]]
        self.send_response(200)
        self.send_header("Content-Length", str(len(json.dumps(answer))))
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads, server.rows = True, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {
            "HOME": f"{tmp_path}/home", "WANDB_API_KEY": "a" * 40,
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        yield server
        server.shutdown()
    wandb.teardown()


def sync(run_dir):
    parts = sorted(run_dir.glob("wandb/offline-run-*"))
    words = [sys.executable, "-m", "wandb", "sync", *parts]
    done = subprocess.run(words, cwd=run_dir, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "ERROR" not in done.stderr, done.stderr


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


KILLED = """
import os, sys, time
from pathlib import Path
import psutil
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from test_wandb_sync import WandbRun, log_steps
folder, first, last = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
log_steps(folder, range(first, last + 1), WandbRun(folder, {}))
file, = folder.glob("wandb/latest-run/*.wandb")
deadline = time.monotonic() + 10
while last - first > 100 and file.stat().st_size < 1 << 16 and time.monotonic() < deadline:
    time.sleep(0.05)
for process in [*psutil.Process().children(recursive=True), psutil.Process()]:
    process.kill()
"""


@pytest.mark.parametrize(
    ("killed", "resumed_after"),
    [
        pytest.param([(1, 200)], 150, id="it logs steps again that it had logged before"),
        pytest.param([(1, 20)], 10, id="it had written nothing when it was killed", marks=pytest.mark.slow),
        pytest.param([(1, 200), (151, 160), (156, 300)], 155, id="more than once", marks=pytest.mark.slow),
    ],
)
def test_a_killed_and_resumed_run_is_uploaded_with_each_step_once(tmp_path, server, killed, resumed_after):
    def resume_after(step):
        MetricsFile(run_dir / METRICS).truncate_after(step)

    run_dir = tmp_path / "run"
    for first, last in killed:
        resume_after(first - 1)
        script = [sys.executable, "-c", KILLED, __file__, run_dir, str(first), str(last)]
        assert subprocess.run(script, cwd=ROOT, timeout=60).returncode == -9
    resume_after(resumed_after)
    last = killed[-1][1] + 20
    run = WandbRun(run_dir, {})
    log_steps(run_dir, range(resumed_after + 1, last + 1), run)
    run.finish({})
    for _ in range(2):
        sync(run_dir)
        assert Counter(row["_step"] for row in server.rows) == dict.fromkeys(range(1, last + 1), 1)
    for row in server.rows:
        expected = {name: value for record in numbers(row["_step"]) for name, value in record.items()}
        assert row["train/loss"] == pytest.approx(expected["loss"])
        assert row.get("val/loss") == expected.get("val_loss")


@pytest.mark.slow
def test_steps_that_are_uploaded_before_a_run_is_resumed_are_not_uploaded_again(tmp_path, server):
    run = WandbRun(tmp_path, {})
    log_steps(tmp_path, range(1, 9), run)
    run.finish(exit_code=1)
    sync(tmp_path)
    MetricsFile(tmp_path / METRICS).truncate_after(5)
    run = WandbRun(tmp_path, {})
    log_steps(tmp_path, range(6, 13), run)
    run.finish({})
    sync(tmp_path)
    assert Counter(row["_step"] for row in server.rows) == dict.fromkeys(range(1, 13), 1)
