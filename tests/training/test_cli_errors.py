"""Errors of a new interpreter: soon said where nothing has begun, and named where a worker comes upon them."""

import re
import resource
import subprocess
import sys

import numpy as np
from commandline import ROOT, environment, train


def test_a_new_interpreter_says_so_for_a_few_times_the_work_of_importing_torch(tmp_path):
    """By the processors' time, which does not depend on what else the machine does."""

    def work() -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime

    begin = work()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=environment(), cwd=ROOT)
    torchs = work() - begin
    words = ["parallel=pipe_ddp", "parallel.dp=2", "train.global_batch_size=10"]
    run = train(words, tmp_path / "run", fresh=True)
    assert run.code == 1 and work() - begin - torchs < 8 * torchs, run.console
    assert "Traceback" not in run.console


def test_what_only_the_workers_can_find_out_ends_the_run_with_its_advice(tmp_path):
    """A loss that explodes on two ranks: the user sees what to try, and the steps before are on record."""
    overrides = [
        "parallel=pipelined",
        "train.epochs=null",
        "train.steps=50",
        "optim.lr=1e30",
        "train.max_skipped=3",
    ]
    run = train([*overrides, "logger=none"], tmp_path / "run")
    assert run.code == 1
    assert "not finite for 4 steps in a row (train.max_skipped=3)" in run.stderr
    assert "optim.lr" in run.stderr
    assert run.steps[0]["loss"] > 0 and run.steps[-1]["skipped"]
    assert not (run.folder / "summary.json").exists()


def test_a_corrupt_row_that_only_training_comes_upon_ends_it_with_its_file_and_line(tmp_path):
    """Of more than a million rows 10,000 are looked at beforehand: here every other one is corrupt but those."""
    good, bad = b'{"text": "a"}\n', b'{"text: "a"}!\n'
    lines = np.tile(np.frombuffer(good, np.uint8), (1_000_001, 1))
    corrupt = np.arange(1, len(lines), 2)
    corrupt = np.setdiff1d(corrupt, np.linspace(0, len(lines) - 1, 10_000, dtype=np.int64))
    lines[corrupt] = np.frombuffer(bad, np.uint8)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines.tobytes())
    words = ["model=gpt2", "model.size=tiny", "data=jsonl", f"data.root={path}", f"data.cache_dir={tmp_path}/cache"]
    more = ["data.seq_len=8", "train.global_batch_size=32", "parallel=ddp", "logger=none", "device=cpu"]
    run = train([*words, *more], tmp_path / "run", timeout_s=120)
    assert run.code == 1, run.console
    cause = run.stderr.strip().splitlines()[-1]
    assert re.search(rf"{path} line \d+: not JSON .* Correct the line", cause), run.stderr
    assert not (run.folder / "summary.json").exists()
