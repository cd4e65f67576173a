"""Whatever ends a run early ends all of it: exit code 1, the cause by name, no process left behind."""

import os
import signal

import pytest
from commandline import Started, wait_until

ENDLESS = ["train.epochs=null", "train.steps=10000000", "logger=none", "device=cpu"]
START_S = 120
# A rank that only lost its connection waits 2.5 s, and one that ignores SIGTERM gets 5.
END_S = 20


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(*overrides):
        run = Started([*ENDLESS, *overrides], tmp_path / "run")
        started.append(run)
        metrics = run.folder / "metrics.jsonl"

        def trains():
            assert run.process.poll() is None, run.wait().console
            return metrics.exists() and metrics.read_text().count("\n") >= 3

        wait_until(trains, START_S, "three steps")
        return run

    yield begin
    for run in started:
        run.kill()


def nobody_is_left(run, timeout_s=10):
    wait_until(lambda: not run.family(), timeout_s, f"the end of {run.family()}")
    return True


def test_a_worker_that_is_killed_ends_the_run_and_is_named(start):
    run = start("parallel=pipe_ddp")
    workers = run.workers()
    assert len(workers) == 4
    workers[2].kill()
    ended = run.wait(END_S)
    assert ended.code == 1
    assert "rank 2 was killed by signal 9 (SIGKILL)" in ended.stderr
    assert "Traceback" not in ended.stderr, "what the others saw of it is not the cause"
    assert nobody_is_left(run)
    assert not (run.folder / "summary.json").exists()
    assert len(ended.steps) >= 3, "what was trained until then is on record"


@pytest.mark.parametrize("to", ["the launching process", "everybody, as a terminal does"])
def test_ctrl_c_ends_a_run_of_workers(start, to):
    run = start("parallel=pipelined")
    if to == "the launching process":
        os.kill(run.process.pid, signal.SIGINT)
    else:
        os.killpg(run.process.pid, signal.SIGINT)
    ended = run.wait(END_S)
    assert ended.code == 1
    assert ended.stderr.splitlines()[-1] == "error: stopped by SIGINT; all workers have ended"
    assert "Traceback" not in ended.console
    assert nobody_is_left(run)


def test_ctrl_c_ends_a_run_in_one_process(start):
    run = start("parallel=single", "data.num_workers=1")
    os.killpg(run.process.pid, signal.SIGINT)
    ended = run.wait(END_S)
    assert ended.code == 1
    assert "error: stopped by SIGINT" in ended.stderr.splitlines()
    assert "Traceback" not in ended.console
    assert nobody_is_left(run)


def test_killing_the_launching_process_leaves_no_workers(start):
    run = start("parallel=pipelined")
    assert len(run.workers()) == 2
    run.process.kill()
    assert run.wait(END_S).code == -signal.SIGKILL
    assert nobody_is_left(run, timeout_s=5)
