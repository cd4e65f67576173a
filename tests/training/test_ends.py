"""Whatever ends a run from outside ends all of it, within its time: with its exit code, and with the cause by name."""

import os
import signal
import time

import pytest
from commandline import Started, train, wait_until

from launchers.stopping import EXIT_CODE, SAME_REQUEST_S

ENDLESS = ["train.epochs=null", "train.steps=10000000", "logger=none", "device=cpu", "parallel.threads=1"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
START_S = 120
# Ranks that gave up tell each other within 4 s, and 15 more where some began to wait much later.
TIMEOUT_S, GIVEN_UP_S = 6, 40
# A rank that only lost its connection waits 2.5 s, and one that ignores SIGTERM gets 5.
END_S = {signal.SIGSTOP: TIMEOUT_S + GIVEN_UP_S, signal.SIGINT: 20, signal.SIGKILL: 20}
STOPPED = (
    "stopped after step {step} of 10000000, saved in {folder}/checkpoints/step-{step:08d}; "
    "go on with the same command and train.resume=auto hydra.run.dir={folder}"
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
    pytest.param("single data.num_workers=2", "group", "SIGTERM", EXIT_CODE, [], marks=SLOW),
    ("pipe_ddp", 2, "SIGKILL", 1, ["rank 2 was killed by signal 9 (SIGKILL)"]),
    ("pipelined", "launcher", "SIGINT", 1, ["error: stopped by SIGINT; all workers have ended"]),
    ("pipelined", "group", "SIGINT", 1, ["error: stopped by SIGINT; all workers have ended"]),
    ("single data.num_workers=1", "group", "SIGINT", 1, ["error: stopped by SIGINT"]),
    ("pipelined", "launcher", "SIGKILL", -signal.SIGKILL, []),
    (f"pipelined {STALLS}", 1, "SIGSTOP", 1, STALLED),
    pytest.param(f"ddp {STALLS}", 0, "SIGSTOP", 1, STALLED, marks=SLOW),
    pytest.param(f"pipelined {STALLS}", 0, "SIGSTOP", 1, STALLED, marks=SLOW),
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


def test_sigterm_to_the_launching_process_stops_all_ranks_and_the_run_goes_on_where_it_was(start, tmp_path):
    run = start("parallel=ddp")
    run.process.terminate()
    ended = run.wait(60)
    assert ended.code == EXIT_CODE == 75, ended.console
    step = ended.steps[-1]["step"]
    has_stopped(run, ended, step)
    more = [*ENDLESS, "parallel=ddp", f"train.steps={step + 2}", "train.resume=auto"]
    resumed = train(more, run.folder, tag="resumed")
    assert resumed.code == 0, resumed.console
    assert [line["step"] for line in resumed.steps] == list(range(1, step + 3))


def test_a_signal_during_start_up_is_not_lost(start):
    run = start(until=Started.heeds)
    run.process.send_signal(signal.SIGUSR2)
    ended = run.wait(START_S)
    assert ended.code == EXIT_CODE, ended.console
    assert "stopped before the first step" in ended.stderr


def test_a_second_signal_ends_all_processes_at_once(start):
    run = start("parallel=pipelined", "parallel.timeout_s=60")
    os.kill(run.workers()[1].pid, signal.SIGSTOP)  # so that no border comes
    run.process.terminate()
    time.sleep(SAME_REQUEST_S + 0.5)
    assert run.process.poll() is None
    run.process.terminate()
    ended = run.wait(30)
    assert ended.code == 128 + signal.SIGTERM
    assert ended.stderr.splitlines()[-1] == "error: stopped by SIGTERM; all workers have ended"
    nobody_is_left(run)
    assert not (run.folder / "checkpoints" / "latest").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name, rank", [("SIGTERM", 1), ("SIGUSR1", 1), ("SIGSTOP", 0), ("SIGSTOP", 1)])
def test_so_it_is_among_ranks_that_torchrun_has_started(start, name, rank):
    # Here rank 1 waits for rank 0's preparations, too.
    run = start("parallel=ddp", f"parallel.timeout_s={5 * TIMEOUT_S}", prefix=TORCHRUN)
    ranks = run.launched()
    os.kill(ranks[rank].pid, signal.Signals[name])
    ended = run.wait(5 * TIMEOUT_S + GIVEN_UP_S + 66)  # torchrun gives a stopped rank 30 s
    if name == "SIGSTOP":
        assert ended.code != 0
        assert f"error: rank {rank} (" in ended.stderr and "has not moved since step " in ended.stderr
    else:
        step = ended.steps[-1]["step"]
        assert f"stopped after step {step} of 10000000, saved in" in ended.stderr
        assert (run.folder / "checkpoints" / "latest").resolve().name == f"step-{step:08d}"
    wait_until(lambda: not any(process.is_running() for process in ranks), 20, f"the end of {ranks}")


@pytest.mark.slow
def test_a_sweep_that_is_stopped_goes_on_with_its_unfinished_jobs(start, tmp_path):
    words = ["-m", "optim.lr=0.01,0.02", f"hydra.sweep.dir={tmp_path}/sweep", "train.checkpoint_every=1"]
    run = start(*words, "train.resume=auto", until=Started.heeds, own_folder=False)
    wait_until((tmp_path / "sweep/0/checkpoints/latest").exists, START_S, "a checkpoint of the first job")
    run.process.terminate()
    ended = run.wait(60)
    assert ended.code == EXIT_CODE, ended.console
    assert "The sweep goes on with its own command and hydra.sweep.dir=" in ended.stderr
    jobs = [(tmp_path / "sweep" / n / "job.json").read_text() for n in ("0", "1")]
    assert '"interrupted"' in jobs[0] and '"waiting"' in jobs[1]


@pytest.mark.slow
def test_the_trials_of_chunk_counts_stop_too(start):
    run = start("parallel=pipelined", "parallel.chunks=auto", until=Started.heeds)
    out = run.folder.parent / "run.console.out"
    wait_until(lambda: "ms a step" in out.read_text(), START_S, "the first of several trials")
    run.process.terminate()
    ended = run.wait(60)
    assert ended.code == EXIT_CODE, ended.console
    assert "stopped before the first step; start it again with the same command" in ended.stderr
    nobody_is_left(run)
