"""SIGTERM, SIGUSR1 and SIGUSR2 have a run save and leave with a code that means "queue me again", wherever it is."""

import os
import random
import signal
import time

import pytest
from commandline import Started, train, wait_until
from composed import losses, records, run, steps

from launchers import stopping
from launchers.stopping import EXIT_CODE, Stopped
from training import evaluate

ENDLESS = ["train.epochs=null", "train.steps=10000000", "logger=none", "device=cpu", "parallel.threads=1"]
START_S = 120
SHORT = ["train.epochs=null", "train.steps=6", "train.eval_every=3", "train.eval_batches=3"]


# -- in this process: at every border -----------------------------------------------------------------------------


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


def test_stopped_at_any_border_and_resumed_a_run_has_the_records_of_one_that_was_not(tmp_path, wish, monkeypatch):
    whole = run(tmp_path / "whole", *SHORT)
    asked = wish(10**9)
    run(tmp_path / "counted", *SHORT)
    borders = len(asked)
    assert borders > 12, "before the first step, at each of six, and within the evaluations"
    for border in range(1, borders + 1):
        folder = tmp_path / f"stopped-{border}"
        wish(border)
        try:
            run(folder, *SHORT)
        except Stopped as stopped:
            assert not (folder / "summary.json").exists()
            latest = folder / "checkpoints" / "latest"
            if border == 1:
                assert "stopped after step 0 of 6, nothing was new to save" in str(stopped)
                assert not latest.exists()
            else:
                assert f"saved in {latest.resolve()}" in str(stopped)
        monkeypatch.undo()
        summary = run(folder, *SHORT, "train.resume=auto")
        assert without_times(records(folder)) == without_times(records(tmp_path / "whole")), f"border {border}"
        for key in ("steps", "first_loss", "final_loss", "best_val_loss", "test_loss"):
            assert summary[key] == whole[key], f"{key}, border {border}"


def test_a_run_that_is_resumed_and_stopped_at_once_has_nothing_new_to_save(tmp_path, wish, monkeypatch):
    wish(4)
    with pytest.raises(Stopped, match="stopped after step 3 of 6, saved in") as stopped:
        run(tmp_path, *SHORT)
    assert stopped.value.steps == 3
    before = written(tmp_path / "checkpoints")
    wish(1)
    with pytest.raises(Stopped, match="stopped after step 3 of 6") as stopped:
        run(tmp_path, *SHORT, "train.resume=auto")
    assert stopped.value.steps == 0, "a job that gets no further is not queued again"
    assert written(tmp_path / "checkpoints") == before


def test_a_stop_without_checkpoints_on_the_way_saves_one(tmp_path, wish):
    wish(3)
    with pytest.raises(Stopped, match="stopped after step 2 of 6, saved in"):
        run(tmp_path, *SHORT, "train.checkpoint_every=null")
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-00000002"


def test_an_evaluation_asks_about_once_a_second_however_many_batches_it_has(tmp_path, wish, monkeypatch):
    asked = wish(10**9)
    monkeypatch.setattr(evaluate, "_ASK_EVERY_S", 1.0)
    few = ["train.epochs=null", "train.steps=1", "train.global_batch_size=1", "data.samples=3000"]
    run(tmp_path, *few)
    assert len(asked) < 100, "before the run, in its step, and now and then in thousands of batches"


# -- the command line ---------------------------------------------------------------------------------------------


def heeds(one):
    """Whether the process has got so far that it handles SIGTERM."""
    for line in open(f"/proc/{one.process.pid}/status"):
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def has_stopped(one, within_s=60):
    """The end of a run that has saved: what it says, its last step."""
    ended = one.wait(within_s)
    assert ended.code == EXIT_CODE == 75, ended.console
    wait_until(lambda: not one.family(), 10, f"the end of {one.family()}")
    said = ended.stderr.splitlines()[-1]
    step = ended.steps[-1]["step"]
    assert f"stopped after step {step} of 10000000, saved in {one.folder}/checkpoints/step-{step:08d}" in said
    assert f"go on with the same command and train.resume=auto hydra.run.dir={one.folder}" in said
    assert "Traceback" not in ended.console
    assert (one.folder / "checkpoints" / "latest").resolve().name == f"step-{step:08d}"
    assert not (one.folder / "summary.json").exists()
    return ended, step


def test_sigterm_to_the_launching_process_stops_all_ranks_and_the_run_goes_on_where_it_was(start, tmp_path):
    one = start("parallel=ddp")
    one.process.terminate()
    ended, step = has_stopped(one)
    more = [*ENDLESS, "parallel=ddp", f"train.steps={step + 2}", "train.resume=auto"]
    resumed = train(more, one.folder, tag="resumed")
    assert resumed.code == 0, resumed.console
    assert [line["step"] for line in resumed.steps] == list(range(1, step + 3))


def test_a_lost_terminal_stops_a_run_as_sigterm_does(start):
    one = start("parallel=pipelined")
    os.killpg(one.process.pid, signal.SIGHUP)  # as the kernel does, to all that are in the foreground
    has_stopped(one)


@pytest.mark.slow
def test_a_signal_to_one_rank_alone_stops_them_all(start):
    one = start("parallel=pipelined")
    os.kill(one.workers()[1].pid, signal.SIGUSR1)
    has_stopped(one)


@pytest.mark.slow
def test_a_signal_to_the_whole_group_leaves_the_loaders_workers_alone(start):
    one = start("parallel=single", "data.num_workers=2")
    os.killpg(one.process.pid, signal.SIGTERM)
    has_stopped(one)


def test_a_signal_during_start_up_is_not_lost(start):
    one = start(until=heeds)
    one.process.send_signal(signal.SIGUSR2)
    ended = one.wait(START_S)
    assert ended.code == EXIT_CODE, ended.console
    assert "stopped before the first step" in ended.stderr


def test_a_second_signal_ends_all_processes_at_once(start):
    one = start("parallel=pipelined", "parallel.timeout_s=60")
    os.kill(one.workers()[1].pid, signal.SIGSTOP)  # so that no border comes
    one.process.terminate()
    time.sleep(1.5)
    assert one.process.poll() is None
    one.process.terminate()
    ended = one.wait(30)
    assert ended.code == 128 + signal.SIGTERM
    assert ended.stderr.splitlines()[-1] == "error: stopped by SIGTERM; all workers have ended"
    wait_until(lambda: not one.family(), 10, f"the end of {one.family()}")
    assert not (one.folder / "checkpoints" / "latest").exists()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_that_torchrun_has_started_stop_too(start, signum):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    one = start("parallel=ddp", prefix=launch)
    ranks = one.launched()
    os.kill(ranks[-1].pid, signum)
    ended = one.wait(90)
    step = ended.steps[-1]["step"]
    assert f"stopped after step {step} of 10000000, saved in" in ended.stderr
    assert (one.folder / "checkpoints" / "latest").resolve().name == f"step-{step:08d}"
    wait_until(lambda: not any(process.is_running() for process in ranks), 20, f"the end of {ranks}")


@pytest.mark.slow
def test_a_sweep_that_is_stopped_goes_on_with_its_unfinished_jobs(tmp_path):
    sweep = [*ENDLESS, f"hydra.sweep.dir={tmp_path}/sweep", "train.checkpoint_every=1", "train.resume=auto"]
    swept = ["-m", "optim.lr=0.01,0.02"]
    one = Started([*swept, *sweep], tmp_path / "sweep", own_folder=False)
    try:
        wait_until(lambda: (tmp_path / "sweep/0/checkpoints/latest").exists(), START_S, "a checkpoint of the first job")
        one.process.terminate()
        ended = one.wait(60)
    finally:
        one.kill()
    assert ended.code == EXIT_CODE, ended.console
    assert "The sweep goes on with its own command and hydra.sweep.dir=" in ended.stderr
    jobs = [(tmp_path / "sweep" / n / "job.json").read_text() for n in ("0", "1")]
    assert '"interrupted"' in jobs[0] and '"waiting"' in jobs[1]


@pytest.mark.slow
def test_the_trials_of_chunk_counts_stop_too(start):
    one = start("parallel=pipelined", "parallel.chunks=auto", until=heeds)
    out = one.folder.parent / "run.console.out"
    wait_until(lambda: "a few steps with each" in out.read_text(), START_S, "the trials")
    time.sleep(3)
    one.process.terminate()
    ended = one.wait(60)
    assert ended.code == EXIT_CODE, ended.console
    assert "stopped before the first step; start it again with the same command" in ended.stderr
    wait_until(lambda: not one.family(), 10, f"the end of {one.family()}")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "ddp", "pipelined", "pipe_ddp"])
def test_stopped_at_random_moments_and_resumed_a_run_has_the_losses_of_one_that_was_not(tmp_path, text, layout):
    recipe = [
        f"parallel={layout}", "model=gpt2", "model.size=tiny", "model.n_layer=2", *text, "train.steps=150",
        "logger=none", "device=cpu", "parallel.threads=1", "train.global_batch_size=8", "train.precision=fp32",
        "train.eval_every=10",
    ]  # fmt: skip
    whole = train(recipe, tmp_path / "whole", timeout_s=280)
    moments, resumed = random.Random(layout), None
    for attempt in range(6):
        one = Started([*recipe, "train.resume=auto"], tmp_path / "run", tag=f"attempt{attempt}")
        try:
            deadline = time.monotonic() + moments.uniform(0.3, whole.seconds / 3)
            while time.monotonic() < deadline and one.process.poll() is None:
                time.sleep(0.02)
            if one.process.poll() is None and heeds(one):
                one.process.terminate()
                begin = time.monotonic()
                resumed = one.wait(60)
                assert time.monotonic() - begin < 30
                assert resumed.code in (EXIT_CODE, 0), resumed.console
        finally:
            one.kill()
    resumed = train([*recipe, "train.resume=auto"], tmp_path / "run", timeout_s=280, tag="last")
    assert resumed.code == 0 or "the checkpoint is at step 150" in resumed.stderr, resumed.console
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert without_times(records(tmp_path / "run")) == without_times(records(tmp_path / "whole"))
    assert [line["step"] for line in steps(tmp_path / "run")] == list(range(1, 151))
