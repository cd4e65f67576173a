"""Whatever ends a run early ends all of it: exit code 1, the cause by name, no process left behind."""

import os
import re
import signal

import numpy as np
import pytest
from commandline import train, wait_until

# A rank that only lost its connection waits 2.5 s, and one that ignores SIGTERM gets 5.
END_S = 20


def has_failed(run):
    """The end of a run that was stopped; none of its processes is left."""
    ended = run.wait(END_S)
    assert ended.code == 1 and "Traceback" not in ended.console, "what others saw of it is not the cause"
    wait_until(lambda: not run.family(), 10, f"the end of {run.family()}")
    assert not (run.folder / "summary.json").exists()
    assert len(ended.steps) >= 3, "what was trained until then is on record"
    return ended.stderr.splitlines()


def test_a_worker_that_is_killed_ends_the_run_and_is_named(start):
    run = start("parallel=pipe_ddp")
    workers = run.workers()
    assert len(workers) == 4
    workers[2].kill()
    assert "rank 2 was killed by signal 9 (SIGKILL)" in "\n".join(has_failed(run))


@pytest.mark.parametrize(
    "words, send, says",
    [
        (["parallel=pipelined"], os.kill, "error: stopped by SIGINT; all workers have ended"),
        (["parallel=pipelined"], os.killpg, "error: stopped by SIGINT; all workers have ended"),  # as a terminal does
        (["parallel=single", "data.num_workers=1"], os.killpg, "error: stopped by SIGINT"),
    ],
)
def test_ctrl_c_ends_a_run(start, words, send, says):
    run = start(*words)
    send(run.process.pid, signal.SIGINT)
    assert has_failed(run)[-1] == says


def test_killing_the_launching_process_leaves_no_workers(start):
    run = start("parallel=pipelined")
    assert len(run.workers()) == 2
    run.process.kill()
    assert run.wait(END_S).code == -signal.SIGKILL
    wait_until(lambda: not run.family(), 5, f"the end of {run.family()}")


def exploding(folder):
    words = ["parallel=pipelined", "train.epochs=null", "train.steps=50", "optim.lr=1e30", "train.max_skipped=3"]
    return words, r"not finite for 4 steps in a row \(train.max_skipped=3\).*optim.lr"


def corrupt_row(folder):
    """Of more than a million rows 10,000 are looked at beforehand: here every other one is corrupt but those."""
    good, bad = b'{"text": "a"}\n', b'{"text: "a"}!\n'
    lines = np.tile(np.frombuffer(good, np.uint8), (1_000_001, 1))
    corrupt = np.setdiff1d(np.arange(1, len(lines), 2), np.linspace(0, len(lines) - 1, 10_000, dtype=np.int64))
    lines[corrupt] = np.frombuffer(bad, np.uint8)
    path = folder / "rows.jsonl"
    path.write_bytes(lines.tobytes())
    words = ["model=gpt2", "model.size=tiny", "data=jsonl", f"data.root={path}", f"data.cache_dir={folder}/cache"]
    more = ["data.seq_len=8", "train.global_batch_size=32", "parallel=ddp"]
    return [*words, *more], rf"{path} line \d+: not JSON .* Correct the line"


@pytest.mark.parametrize("cause", [exploding, corrupt_row])
def test_what_only_the_workers_can_find_out_ends_the_run_with_its_numbers_and_advice(tmp_path, cause):
    words, says = cause(tmp_path)
    run = train([*words, "logger=none", "device=cpu"], tmp_path / "run")
    assert run.code == 1, run.console
    assert re.search(says, run.stderr.strip().splitlines()[-1]), run.stderr
    assert not (run.folder / "summary.json").exists()
