"""One run at a time in a directory."""

import errno
import fcntl
import multiprocessing
import os
import socket
import time

import pytest
from commandline import Started, wait_until
from hydra.types import RunMode
from omegaconf import OmegaConf

import train as command
from common.errors import TrainingError
from training.reporting.run_directory import LOCK, hold, locked_directories, release, take

FEW = ["logger=none", "device=cpu", "train.epochs=null", "train.steps=2", "train.eval_every=null"]
ENDLESS = ["logger=none", "device=cpu", "train.epochs=null", "train.steps=10000000", "train.eval_every=null"]


def hold_and_wait(folder, pipe):
    hold(folder)
    if os.fork() == 0:  # as workers that read data are: it outlives the holder
        time.sleep(5)
        os._exit(0)
    pipe.send(os.getpid())
    pipe.recv()


@pytest.fixture
def other(tmp_path):
    """A process that holds the lock of ``tmp_path/run`` until it is killed."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=hold_and_wait, args=(tmp_path / "run", theirs))
    process.start()
    assert ours.recv() == process.pid
    yield process
    process.kill()
    process.join()


def test_death_frees_the_lock(tmp_path, other):
    other.kill()
    other.join()
    with locked_directories():
        hold(tmp_path / "run")
    assert not (tmp_path / "run" / LOCK).exists()


@pytest.mark.parametrize(
    "words", ["hydra.run.dir={}", "hydra.run.dir={} train.resume=auto", "hydra.sweep.dir={} -m seed=1,2"]
)
def test_none_begins_where_another_one_runs(tmp_path, other, capsys, words):
    assert command.main([*FEW, *words.format(tmp_path / "run").split()]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    holder = f"process {other.pid} on {socket.gethostname()}, since 20"
    assert said.startswith(f"error: {tmp_path}/run is in use by another run: {holder}")
    assert "choose another directory (hydra.run.dir" in said
    assert os.listdir(tmp_path / "run") == [LOCK], "Hydra has written nothing there either"


def test_of_two_runs_that_start_together_one_writes(tmp_path):
    both = [Started(ENDLESS, tmp_path / "run", tag=f"console{n}") for n in (0, 1)]
    try:
        wait_until(lambda: any(one.process.poll() is not None for one in both), 60, "the end of one of them")
        loser = next(one for one in both if one.process.poll() is not None)
        winner = next(one for one in both if one is not loser)
        refused = loser.wait()
        assert refused.code == 1 and "is in use by another run: process" in refused.stderr
        wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), 60, "a first step")
        winner.process.terminate()
        steps = [line["step"] for line in winner.wait().metrics]
        assert steps == list(range(1, len(steps) + 1))
    finally:
        for one in both:
            one.kill()


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    hold(tmp_path)
    release(tmp_path)
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_a_sweep_of_several_tasks_of_a_job_is_refused(monkeypatch):
    step = {"ID": "0", "NUM_TASKS": "2", "TASKS_PER_NODE": "2", "NODELIST": "n1"}
    names = {"PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_ID": "7"} | {f"STEP_{key}": step[key] for key in step}
    for name, value in names.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(TrainingError, match="without torchrun or srun"):
        take(OmegaConf.create({"hydra": {"mode": RunMode.MULTIRUN}}))
