"""Whatever ends a run ends all of it, within its time: with its exit code, and with the cause by name. One that is
told to stop saves at its next border, wherever it is, and goes on from there."""

import os
import re
import signal
import time

import numpy as np
import psutil
import pytest
from commandline import Started, train, wait_until
from composed import records
from composed import run as train_here

from data import jsonl
from launchers import stopping
from launchers.stopping import EXIT_CODE, Stopped
from training.run import evaluate

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
START_S = 120
# Ranks that gave up tell each other within 4 s, and 15 more where some began to wait much later.
TIMEOUT_S, GIVEN_UP_S = 4, 40
# A rank that only lost its connection waits 2.5 s, and one that ignores SIGTERM gets 5.
END_S = {signal.SIGSTOP: TIMEOUT_S + GIVEN_UP_S, signal.SIGINT: 20, signal.SIGKILL: 20}
STOPPED = (
    "stopped after step {step} of 10000000, saved in {folder}/checkpoints/step-{step:08d}; "
    "continue with the same command and train.resume=auto hydra.run.dir={folder}"
)
STALLED = ["error: rank {rank} has not moved since step ", f"(parallel.timeout_s={TIMEOUT_S})"]
STALLS = f"parallel.timeout_s={TIMEOUT_S}"


def nobody_is_left(run):
    wait_until(lambda: not run.family(), 10, f"the end of {run.family()}")


def has_stopped(run, ended, step):
    """The run has saved its last step."""
    assert (run.folder / "checkpoints" / "latest").resolve().name == f"step-{step:08d}"
    assert STOPPED.format(step=step, folder=run.folder) in ended.stderr.splitlines()[-1]


SLOW = pytest.mark.slow
CASES = [
    # the run; to whom (the launching process, its whole group as a terminal does, a rank), which signal; the exit code,
    # and what it says
    ("pipelined", "group", "SIGHUP", EXIT_CODE, []),
    pytest.param("pipelined", 1, "SIGUSR1", EXIT_CODE, [], marks=SLOW),
    ("pipe_ddp", 2, "SIGKILL", 1, ["rank 2 was killed by signal 9 (SIGKILL)"]),
    ("pipelined", "group", "SIGINT", 1, ["error: stopped by SIGINT; all workers have ended"]),
    pytest.param("single data.num_workers=1", "group", "SIGINT", 1, ["error: stopped by SIGINT"], marks=SLOW),
    ("pipelined", "launcher", "SIGKILL", -signal.SIGKILL, []),
    pytest.param(f"pipelined {STALLS}", 1, "SIGSTOP", 1, STALLED, marks=SLOW),
    pytest.param(f"pipe_ddp {STALLS}", 2, "SIGSTOP", 1, STALLED, marks=SLOW),
]


@pytest.mark.parametrize("layout, whom, name, code, words", CASES)
def test_a_signal_ends_the_run_with_its_code_and_the_cause_and_nobody_is_left(start, layout, whom, name, code, words):
    run, signum = start(*f"parallel={layout}".split()), signal.Signals[name]
    if whom == "group":
        os.killpg(run.process.pid, signum)
    else:
        os.kill(run.process.pid if whom == "launcher" else run.workers()[whom].pid, signum)
    ended = run.wait(END_S.get(signum, 60))
    assert ended.code == code, ended.console
    for said in words:
        assert said.format(rank=whom) in ended.stderr
    assert "Traceback" not in ended.console or whom == "launcher", "what the others saw of it is not the cause"
    nobody_is_left(run)
    assert not (run.folder / "summary.json").exists()
    assert len(ended.steps) >= 3, "what was trained until then is on record"
    if code == EXIT_CODE:
        has_stopped(run, ended, ended.steps[-1]["step"])


def test_sigterm_to_the_launching_process_stops_all_ranks_and_the_run_goes_on_where_it_was(start):
    run = start("parallel=ddp")
    run.process.terminate()
    ended = run.wait(60)
    assert ended.code == EXIT_CODE == 75, ended.console
    step = ended.steps[-1]["step"]
    has_stopped(run, ended, step)
    more = ["train.epochs=null", f"train.steps={step + 2}", "train.resume=auto", "logger=none", "device=cpu"]
    resumed = train(["parallel=ddp", *more], run.folder, tag="resumed")
    assert resumed.code == 0, resumed.console
    assert [line["step"] for line in resumed.steps] == list(range(1, step + 3))


def test_a_signal_during_start_up_is_not_lost(start):
    run = start(until=Started.heeds)
    run.process.send_signal(signal.SIGUSR2)
    ended = run.wait(START_S)
    assert ended.code == EXIT_CODE, ended.console
    assert "stopped before the first step" in ended.stderr


def impatient():
    """In a new process: what comes a second later is another request."""
    stopping.SAME_REQUEST_S = 1.0


def test_a_second_signal_ends_all_processes_at_once(start):
    run = start("parallel=pipelined", "parallel.timeout_s=60", before=impatient)
    os.kill(run.workers()[1].pid, signal.SIGSTOP)  # so that no border comes
    run.process.terminate()
    time.sleep(1.5)
    assert run.process.poll() is None
    run.process.terminate()
    ended = run.wait(30)
    assert ended.code == 128 + signal.SIGTERM
    assert ended.stderr.splitlines()[-1] == "error: stopped by SIGTERM; all workers have ended"
    nobody_is_left(run)
    assert not (run.folder / "checkpoints" / "latest").exists()


def has_checkpoint(run):
    return any(run.folder.glob("**/checkpoints/latest"))


@pytest.mark.slow
@pytest.mark.parametrize("name, whom", [("SIGUSR1", 1), ("SIGKILL", "torchrun"), ("SIGSTOP", 0)])
def test_so_it_is_among_ranks_that_torchrun_has_started(start, name, whom):
    # Here rank 1 waits for rank 0's preparations, too.
    run = start("parallel=ddp", f"parallel.timeout_s={5 * TIMEOUT_S}", prefix=TORCHRUN)
    ranks = run.launched()
    os.kill(run.process.pid if whom == "torchrun" else ranks[whom].pid, signal.Signals[name])
    lives = lambda rank: rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE  # noqa: E731
    try:
        ended = run.wait(5 * TIMEOUT_S + GIVEN_UP_S + 66)  # torchrun gives a stopped rank 30 s
        wait_until(lambda: not any(map(lives, ranks)), 30, f"the end of {ranks}")
    finally:
        for rank in filter(lives, ranks):
            rank.kill()
    if name == "SIGSTOP":
        assert ended.code != 0
        assert "error: rank 0 (" in ended.stderr and "has not moved since step " in ended.stderr
    else:
        step = run.wait().steps[-1]["step"]
        assert f"stopped after step {step} of 10000000, saved in" in run.wait().stderr
        assert (run.folder / "checkpoints" / "latest").resolve().name == f"step-{step:08d}"


@pytest.mark.slow
@pytest.mark.parametrize("own_folder", [True, False], ids=["a directory of the user's", "the default directory"])
def test_a_run_that_torchrun_starts_again_goes_on_by_itself(tmp_path, own_folder):
    words = ["parallel=ddp", "logger=none", "device=cpu", "train.epochs=null", "train.checkpoint_every=20"]
    words += ["train.eval_every=null", "train.steps=3000"]
    prefix = [*TORCHRUN, "--max-restarts", "1"]
    one = Started(words, tmp_path / "run", prefix=prefix, cwd=tmp_path, own_folder=own_folder)
    one.folder = tmp_path / ("run" if own_folder else "outputs")
    try:
        wait_until(lambda: has_checkpoint(one), START_S, "a checkpoint")
        os.kill(one.launched()[1].pid, signal.SIGKILL)
        ended = one.wait(180)
        assert ended.code == 0, ended.console
        (metrics,) = one.folder.glob("**/metrics.jsonl")
        ended.folder = metrics.parent
        assert [line["step"] for line in ended.steps] == list(range(1, 3001))
        assert "resuming from" in ended.stdout
    finally:
        one.kill()


@pytest.mark.slow
def test_a_sweep_that_is_stopped_goes_on_with_its_unfinished_jobs(start, tmp_path):
    words = ["-m", "optim.lr=0.01,0.02", f"hydra.sweep.dir={tmp_path}/sweep", "train.checkpoint_every=1"]
    run = start(*words, "train.resume=auto", until=Started.heeds, own_folder=False)
    wait_until((tmp_path / "sweep/0/checkpoints/latest").exists, START_S, "a checkpoint of the first job")
    run.process.terminate()
    ended = run.wait(60)
    assert ended.code == EXIT_CODE, ended.console
    assert "Continue the sweep with its command and hydra.sweep.dir=" in ended.stderr
    jobs = [(tmp_path / "sweep" / n / "job.json").read_text() for n in ("0", "1")]
    assert '"interrupted"' in jobs[0] and '"waiting"' in jobs[1]


def test_one_process_of_those_that_measure_is_told_to_stop_and_all_do(start):
    run = start("parallel=auto", until=Started.workers)
    run.workers()[-1].terminate()
    ended = run.wait(60)
    assert ended.code == EXIT_CODE, ended.console
    assert "stopped before the first step; " in ended.stderr and "Traceback" not in ended.stderr
    nobody_is_left(run)


# -- what only the workers can find out ------------------------------------------------------------------------------


def look_at_few_rows():
    """In a new process: what holds for a million rows holds for a thousand."""
    jsonl._CHECK_ALL, jsonl._CHECK_SOME = 1000, 100


def test_what_only_the_workers_can_find_out_ends_the_run_with_its_advice(tmp_path):
    """Of many rows some are looked at beforehand: here every other one is corrupt but those."""
    rows = 2001
    seen = {*np.linspace(0, rows - 1, 100, dtype=np.int64)}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join('{"text": "a"}\n' if i % 2 == 0 or i in seen else '{"text: "a"}!\n' for i in range(rows)))
    words = ["model=gpt2", "model.size=tiny", "data=jsonl", f"data.root={path}", f"data.cache_dir={tmp_path}/cache"]
    words += ["data.seq_len=8", "train.global_batch_size=32", "parallel=ddp", "launcher.max_restarts=3"]
    run = train([*words, "logger=none", "device=cpu"], tmp_path / "run", before=look_at_few_rows)
    assert run.code == 1, run.console
    assert re.search(rf"{path} line \d+: not JSON .* Correct the line", run.stderr.strip().splitlines()[-1]), run.stderr
    assert "restart 1" not in run.stderr, "it would only come again"
    assert not (run.folder / "summary.json").exists()


# -- at every border ---------------------------------------------------------------------------------------------------

SHORT = ["train.epochs=null", "train.steps=4", "train.eval_every=2", "train.eval_batches=2"]


@pytest.fixture
def wish(monkeypatch):
    """``wish(n)``: from the n-th time on that it is asked, the loop hears that it should stop."""

    def at(count):
        asked = []

        def wanted():
            asked.append(None)
            return len(asked) >= count

        monkeypatch.setattr(stopping, "wanted", wanted)
        monkeypatch.setattr(evaluate, "_ASK_EVERY_S", 0.0)
        return asked

    return at


def written(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def without_times(lines):
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in lines]


@pytest.mark.slow
def test_stopped_at_any_border_and_resumed_a_run_has_the_records_of_one_that_was_not(tmp_path, wish, monkeypatch):
    whole = train_here(tmp_path / "whole", *SHORT)
    asked = wish(10**9)
    train_here(tmp_path / "counted", *SHORT)
    borders = len(asked)
    assert borders >= 8, "before the first step, at each of four, and within the evaluations"
    for border in range(1, borders + 1):
        folder = tmp_path / f"stopped-{border}"
        wish(border)
        try:
            train_here(folder, *SHORT)
        except Stopped as stopped:
            assert not (folder / "summary.json").exists()
            latest = folder / "checkpoints" / "latest"
            if border == 1:
                assert "stopped after step 0 of 4, nothing was new to save" in str(stopped)
                assert not latest.exists()
            else:
                assert f"saved in {latest.resolve()}" in str(stopped)
        monkeypatch.undo()
        summary = train_here(folder, *SHORT, "train.resume=auto")
        assert without_times(records(folder)) == without_times(records(tmp_path / "whole")), f"border {border}"
        for key in ("steps", "first_loss", "final_loss", "best_val_loss", "test_loss"):
            assert summary[key] == whole[key], f"{key}, border {border}"


def test_the_evaluation_that_a_stopped_run_owes_is_made_in_another_directory_too(tmp_path, wish, monkeypatch):
    train_here(tmp_path / "whole", *SHORT)
    wish(4)
    with pytest.raises(Stopped, match="stopped after step 2 of 4, saved in"):
        train_here(tmp_path / "stopped", *SHORT)
    monkeypatch.undo()
    train_here(tmp_path / "continued", *SHORT, f"train.resume={tmp_path / 'stopped'}")
    whole, continued = (records(tmp_path / name) for name in ("whole", "continued"))
    assert without_times(continued) == [line for line in without_times(whole) if line["step"] > 2 or "val_loss" in line]


def test_a_run_that_is_resumed_and_stopped_at_once_has_nothing_new_to_save(tmp_path, wish, monkeypatch):
    wish(4)
    with pytest.raises(Stopped, match="stopped after step 2 of 4, saved in") as stopped:
        train_here(tmp_path, *SHORT)
    assert stopped.value.steps == 2
    before = written(tmp_path / "checkpoints")
    wish(1)
    with pytest.raises(Stopped, match="stopped after step 2 of 4") as stopped:
        train_here(tmp_path, *SHORT, "train.resume=auto")
    assert stopped.value.steps == 0, "a job that gets no further is not queued again"
    assert written(tmp_path / "checkpoints") == before


def test_a_stop_without_checkpoints_on_the_way_saves_one(tmp_path, wish):
    wish(3)
    with pytest.raises(Stopped, match="stopped after step 2 of 4, saved in"):
        train_here(tmp_path, *SHORT, "train.checkpoint_every=null")
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-00000002"
