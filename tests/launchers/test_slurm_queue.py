"""What is submitted, and what is made of the queue's answers: against made-up commands of SLURM's."""

import json
import os
import signal
import subprocess

import pytest

from common.errors import LaunchError
from conf.schema import Slurm
from launchers import slurm, slurm_queue

NASTY = "a 'b' \"c\" $(touch struck)\ntouch struck; `touch struck`"
ECHO = "import json, os, sys; json.dump([sys.argv[1:], os.environ['TEXT'], os.environ['EARLY']], sys.stdout)"


@pytest.fixture
def answer(monkeypatch):
    """A function that makes SLURM's commands answer; it returns the list of the commands that are then run."""

    def prepare(code=0, stdout="", stderr=""):
        commands = []

        def run(command, **options):
            commands.append(command)
            return subprocess.CompletedProcess(command, code, stdout, stderr)

        monkeypatch.setattr(slurm_queue.subprocess, "run", run)
        return commands

    return prepare


def submit(folder, options=None, count=1, **more):
    command = ["-c", ECHO, NASTY]
    return slurm.submit(command, [folder] * count, options or Slurm(), 2, folder, NASTY, **more)


def test_no_value_becomes_a_shell_line(answer, tmp_path):
    commands = answer(stdout="7\n")
    comment = NASTY.replace("\n", " ")
    submit(tmp_path, Slurm(setup=["export EARLY=yes"], sbatch={"comment": comment}), env={"TEXT": NASTY, "A;B": "x"})
    (command,) = commands
    assert f"--job-name={NASTY}" in command and f"--comment={comment}" in command, "no shell reads these"
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/sh\nshift 3\nexec "$@"\n')
    (tools / "srun").chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    process = subprocess.Popen(["bash", command[-1]], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert json.loads(process.communicate(timeout=30)[0]) == [[NASTY], NASTY, "yes"]
    assert not (tmp_path / "struck").exists()
    assert (tmp_path / "job.sh").stat().st_mode & 0o077 == 0, "it may hold secrets"


def test_every_option_reaches_sbatch(answer, tmp_path):
    commands = answer(stdout="7;cluster\n")
    options = Slurm(
        nodes=2, cpus_per_task=3, mem_gb=1.5, gpus_per_node=4, partition="p", account="a", qos="q", time_min=30,
        signal_s=90, max_parallel=5, sbatch={"constraint": "gold", "no_requeue": True, "exclusive": None},
    )  # fmt: skip
    jobs = submit(tmp_path, options, count=8)
    assert [job.id for job in jobs] == [f"7_{index}" for index in range(8)]
    assert set(commands[0]) > {
        "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=3", "--mem=1536M", "--gpus-per-node=4", "--partition=p",
        "--account=a", "--qos=q", "--time=30", "--signal=USR2@90", "--array=0-7%5", "--constraint=gold", "--no-requeue",
    }  # fmt: skip
    assert not [word for word in commands[0] if "exclusive" in word]


def test_a_job_that_the_queue_forgot_after_its_end_is_done(monkeypatch, tmp_path):
    monkeypatch.setattr(slurm_queue, "look", lambda jobs: {})
    monkeypatch.setattr(slurm, "_UNKNOWN_S", 0.1)
    (tmp_path / "7_0.json").write_text("{}")
    jobs = [slurm.Job("7", tmp_path, tmp_path, ranks, time_min=1) for ranks in (1, 2)]
    slurm.wait(jobs, 0.05, print)
    assert jobs[0].error is None
    assert "job 7 has vanished from the queue without an end" in str(jobs[1].error), "rank 1 has left no report"


def test_a_requeue_that_is_stopped_with_the_job_it_stops_has_not_failed(answer):
    for code in (0, -signal.SIGTERM):
        answer(code)
        slurm_queue.requeue("7")


def test_a_requeue_that_is_refused_says_why(answer):
    answer(1, stderr="Invalid job id specified")
    with pytest.raises(LaunchError, match="scontrol requeue 7: Invalid job id"):
        slurm_queue.requeue("7")


def test_a_machine_without_slurm_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch not found: launcher=slurm works on machines from which SLURM's"):
        submit(tmp_path)
