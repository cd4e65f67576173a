"""What is submitted, and what is made of answers that a small cluster does not give: SLURM's commands are made up."""

import json
import os
import signal
import subprocess

import pytest

from common.errors import LaunchError
from conf.schema import Slurm
from launchers import World
from launchers.slurm import follow, task
from launchers.slurm import submit as submitting
from launchers.slurm.follow import State, exit_codes, explain, update
from launchers.slurm.submit import Job
from launchers.stopping import Stopped

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

        monkeypatch.setattr(submitting.subprocess, "run", run)
        return commands

    return prepare


def submit(folder, options=None, count=1, **more):
    command = ["-c", ECHO, NASTY]
    return submitting.submit(command, [folder] * count, options or Slurm(), 2, folder, NASTY, **more)


def test_no_value_becomes_a_shell_line(answer, tmp_path):
    commands = answer(stdout="7\n")
    comment = NASTY.replace("\n", " ")
    submit(tmp_path, Slurm(setup=["export EARLY=yes"], sbatch={"comment": comment}), env={"TEXT": NASTY, "A;B": "x"})
    _, command = commands
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
    assert set(commands[-1]) > {
        "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=3", "--mem=1536M", "--gpus-per-node=4", "--partition=p",
        "--account=a", "--qos=q", "--time=30", "--signal=USR2@90", "--array=0-7%5", "--constraint=gold", "--no-requeue",
    }  # fmt: skip
    assert not [word for word in commands[-1] if "exclusive" in word]


def test_a_job_that_the_queue_forgot_after_its_end_is_done(monkeypatch, tmp_path):
    monkeypatch.setattr(follow, "look", lambda jobs: {})
    monkeypatch.setattr(follow, "_SETTLE_S", 0.1)
    (tmp_path / "7_0.json").write_text("{}")
    jobs = [Job("7", tmp_path, tmp_path, ranks, time_min=1) for ranks in (1, 2)]
    follow.wait(jobs, 0.05, print)
    assert jobs[0].error is None
    assert "job 7 has vanished from the queue without an end" in str(jobs[1].error), "rank 1 has left no report"


@pytest.fixture
def time_passes(monkeypatch):
    """The clock of jobs that are followed; ``time_passes(60)`` sets it forward."""
    now = [0.0]
    monkeypatch.setattr(follow.time, "monotonic", lambda: now[0])

    def forward(seconds):
        now[0] += seconds

    return forward


def test_a_report_that_a_shared_file_system_shows_late_is_waited_for(time_passes, tmp_path):
    for id, late in (("7", True), ("8", False)):
        job = Job(id, tmp_path, tmp_path, 2, time_min=1)
        (tmp_path / f"{id}_0.json").write_text("{}")
        for _ in range(3):
            update(job, State("COMPLETED", "None", "n1"), print)
            assert not job.done
            time_passes(5)
        if late:
            (tmp_path / f"{id}_1.json").write_text("{}")
            update(job, State("COMPLETED", "None", "n1"), print)
            assert job.done and job.error is None
        else:
            time_passes(60)
            update(job, State("COMPLETED", "None", "n1"), print)
            assert "rank 1 left with exit code 0 before its work was done" in str(job.error)


def test_a_job_that_cannot_start_as_things_are_is_cancelled_when_that_has_lasted_five_minutes(
    answer, time_passes, tmp_path
):
    commands, said = answer(), []
    job, reason = Job("7", tmp_path, tmp_path, 2, time_min=1), "QOSMaxNodePerJobLimit"
    for seconds, name in ((0, reason), (200, reason), (200, "Resources"), (100, reason), (299, reason)):
        time_passes(seconds)
        update(job, State("PENDING", name, ""), said.append)
    assert not job.done and commands == []
    time_passes(1)
    update(job, State("PENDING", reason, ""), said.append)
    assert commands == [["scancel", "7"]]
    assert f"job 7 does not start: it has waited for {reason} for 5 min" in str(job.error)
    assert len(said) == 3 and said[0].endswith("; it is cancelled if that lasts 5 min)")


def test_why_a_job_waits_is_shown_whenever_it_changes(tmp_path):
    job, said = Job("7", tmp_path, tmp_path, 2, time_min=1), []
    waits = [("PENDING", reason) for reason in ("Priority", "Priority", "ReqNodeNotAvail", "Resources")]
    for name, reason in [*waits, ("RUNNING", "None"), ("RUNNING", "None"), ("REQUEUED", "BeginTime")]:
        update(job, State(name, reason, "n1"), said.append)
    waited = [f"job 7 waits in the queue ({reason})" for reason in ("Priority", "ReqNodeNotAvail", "Resources")]
    assert said == [*waited, "job 7 runs on n1", "job 7 waits in the queue (BeginTime)"]


@pytest.mark.parametrize("state", ["FAILED", "OUT_OF_MEMORY"])
def test_of_ranks_out_of_memory_and_those_that_were_ended_after_them_the_first_are_named(tmp_path, state):
    said = "srun: error: n1: task 2: Out Of Memory\nsrun: error: n1: tasks 0-1,3: Terminated\n"
    (tmp_path / "7.err").write_text(said)
    error = str(explain(Job("7", tmp_path, tmp_path, 4, time_min=1), State(state, "OutOfMemory", "n1")))
    assert error.startswith("job 7 (rank 2) was killed for using more memory than it asked for; set launcher.mem_gb")


def test_exit_codes_are_read_from_what_srun_says_of_the_last_attempt():
    text = """\
srun: error: n1: tasks 0-1: Terminated
slurmstepd-n1: error: *** JOB 5 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO JOB REQUEUE ***
srun: error: n2: task 2: Exited with exit code 3
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: n1: tasks 0-1: Terminated
srun: error: n2: task 3: Killed
"""
    assert exit_codes(text) == {2: 3, 0: -15, 1: -15, 3: -9}


SINFO = "8|all*|n1\n8|all*|n2\n64|big|n3\n"
OF_ITS_OWN = ("output", "nodes", "ntasks_per_node", "wrap", "export", "test-only")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Slurm(cpus_per_task=64), "launcher.nodes=1 needs 128 CPUs per node, for 2 processes of "
         "launcher.cpus_per_task=64, but 0 of the partition's 2 nodes have as many and the largest has 8; set "
         "launcher.cpus_per_task=4 at most"),
        (Slurm(sbatch={"cpus_per_task": 5}), "10 CPUs per node, for 2 processes of launcher.cpus_per_task=5"),
        (Slurm(nodes=2, cpus_per_task=32, partition="all,big"), "1 of the partition's 3 nodes have as many and the "
         "largest has 64; set launcher.cpus_per_task=8 at most"),
        (Slurm(signal_s=300, time_min=5), "launcher.signal_s=300 is not below the time limit"),
        (Slurm(tasks_per_node=3), "launcher.nodes=1 x launcher.tasks_per_node=3 = 3 processes, but the run has 2"),
        (Slurm(nodes=3), "2 processes .* cannot be dealt equally to launcher.nodes=3"),
        *((Slurm(sbatch={key: "x"}), f"launcher.sbatch.{key} is not allowed: ") for key in OF_ITS_OWN),
    ],
)  # fmt: skip
def test_what_cannot_be_is_an_error_before_anything_is_queued(answer, tmp_path, options, words):
    commands = answer(stdout=SINFO)
    with pytest.raises(LaunchError, match=words):
        submit(tmp_path, options)
    assert "sbatch" not in [command[0] for command in commands]


@pytest.mark.parametrize(
    ("options", "sinfo"),
    [
        (Slurm(nodes=2, cpus_per_task=4, partition="few"), "8|few|n1\n"),  # which may get a second node
        (Slurm(cpus_per_task=4), SINFO),
        (Slurm(cpus_per_task=4, partition="big"), SINFO),
        (Slurm(cpus_per_task=64, sbatch={"overcommit": True}), SINFO),
    ],
)
def test_processors_that_nodes_have_or_may_get_are_asked_for(answer, tmp_path, options, sinfo):
    commands = answer(stdout=sinfo)
    submit(tmp_path, options)
    assert commands[-1][0] == "sbatch"


def test_a_container_is_an_option_of_srun_and_its_python_runs(answer, tmp_path):
    commands = answer(stdout="7\n")
    container = {"container_image": "nvcr.io#nvidia/pytorch:25.06-py3", "container-mounts": "/a b:/c", "nice": 5}
    submit(tmp_path, Slurm(sbatch={**container, "no_container_mount_home": True, "get_user_env": "5L"}))
    assert {"--nice=5", "--get-user-env=5L"} < set(commands[-1])
    assert not [word for word in commands[-1] if "--container" in word or "--no-" in word], (
        "the script calls srun, which no image has"
    )
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"')
    (tmp_path / "srun").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(["bash", commands[-1][-1]], env=env, stdout=subprocess.PIPE, text=True)
    words = process.communicate(timeout=30)[0].splitlines()
    image, mounts = "--container-image=nvcr.io#nvidia/pytorch:25.06-py3", "--container-mounts=/a b:/c"
    assert words[3:9] == [image, mounts, "--no-container-mount-home", "env", "--block-signal=USR2", "python"]


@pytest.mark.parametrize(("restarts", "steps", "queued"), [(0, 0, True), (1, 3, True), (1, 0, False)])
def test_a_job_that_was_queued_again_and_has_trained_no_step_is_not_queued_again(
    answer, monkeypatch, restarts, steps, queued
):
    commands = answer()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    monkeypatch.setattr(task, "_KILLED_S", 0.0)
    words = "has not ended this attempt" if queued else "has trained no step since"
    with pytest.raises(LaunchError, match=words), task.requeued(World.alone()):
        raise Stopped("stopped", steps=steps)
    assert commands == [["scontrol", "requeue", "7"]] * queued


def test_a_requeue_that_is_refused_says_why_and_one_that_is_stopped_with_its_job_has_not_failed(answer):
    for code in (0, -signal.SIGTERM):
        answer(code)
        task.requeue("7")
    answer(1, stderr="Invalid job id specified")
    with pytest.raises(LaunchError, match="scontrol requeue 7: Invalid job id"):
        task.requeue("7")


def test_a_machine_without_slurm_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch not found: launcher=slurm works on machines from which SLURM's"):
        submit(tmp_path)
