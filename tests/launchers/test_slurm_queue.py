"""What is submitted, and what is made of answers that a small cluster does not give: SLURM's commands are made up."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from composed import config

from common.errors import LaunchError
from conf.instantiate import with_values
from conf.schema import Slurm
from launchers import World
from launchers.slurm import follow, task
from launchers.slurm import submit as submitting
from launchers.slurm.follow import State, explain, update
from launchers.slurm.submit import Job
from launchers.stopping import Stopped
from training.command import slurm_job

RAISED = {"message": "ValueError: bad luck", "peer": False, "timestamp": 2.0}
PEER = {"message": "Connection closed by peer", "peer": True, "timestamp": 1.0}
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


def run_by_bash(folder, srun, *words, **env):
    """What a script prints where ``srun`` is this one."""
    (tools := folder / "tools").mkdir()
    (tools / "srun").write_text(f"#!/bin/sh\n{srun}\n")
    (tools / "srun").chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", **env}
    return subprocess.Popen(["bash", *words], cwd=folder, env=env, stdout=subprocess.PIPE, text=True).communicate()[0]


def test_no_value_becomes_a_shell_line(answer, tmp_path):
    commands = answer(stdout="7\n")
    comment = NASTY.replace("\n", " ")
    submit(tmp_path, Slurm(setup=["export EARLY=yes"], sbatch={"comment": comment}), env={"TEXT": NASTY, "A;B": "x"})
    (command,) = commands
    assert f"--job-name={NASTY}" in command and f"--comment={comment}" in command, "no shell reads these"
    said = run_by_bash(tmp_path, 'shift 4\nexec "$@"', command[-1])
    assert json.loads(said) == [[NASTY], NASTY, "yes"]
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


def test_a_folder_with_a_percent_sign_is_the_one_in_which_sbatch_writes(answer, tmp_path):
    commands = answer(stdout="7\n")
    (job,) = submit(tmp_path / "50%j")
    assert job.output == tmp_path / "50%j" / "7.out"
    assert {f"--output={tmp_path}/50%%j/%j.out", f"--error={tmp_path}/50%%j/%j.err"} <= {*commands[-1]}


def test_ranks_have_the_environment_of_the_command_whatever_the_cluster_exports(answer, tmp_path):
    commands = answer(stdout="7\n")
    submit(tmp_path)
    assert "--export=ALL" in commands[-1], "it overrides SBATCH_EXPORT"
    assert "srun --export=ALL " in (tmp_path / "job.sh").read_text(), "it overrides SLURM_EXPORT_ENV"


def test_a_second_submission_into_a_directory_changes_no_job_that_waits_there(answer, tmp_path, monkeypatch):
    answer(stdout="7\n")
    read = []
    monkeypatch.setattr(slurm_job, "work", lambda entry, *_: read.append(entry.args))
    commands = []
    for seed in (1, 2):
        cfg = with_values(config("launcher=slurm"), {"seed": seed})
        slurm_job.queue([slurm_job.CheckedRun(cfg, tmp_path, 1)], tmp_path / "slurm", "toy")
        (words,) = re.findall(r"^run=\((.*)\)$", (tmp_path / "slurm" / "job.sh").read_text(), re.MULTILINE)
        commands.append(shlex.split(words))
    for command in commands:
        folder, *submission = command[command.index("training.command.slurm_job") + 1 :]
        slurm_job._main(Path(folder), *submission)
    assert [(cfg.seed, run_dir) for cfg, run_dir in read] == [(1, tmp_path), (2, tmp_path)]


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
        job = Job(id, tmp_path, tmp_path, 2)
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
            assert "ended without a report, as if killed: rank 1" in str(job.error)


def test_why_a_job_waits_is_shown_whenever_it_changes(tmp_path):
    job, said = Job("7", tmp_path, tmp_path, 2), []
    waits = [("PENDING", reason) for reason in ("Priority", "Priority", "ReqNodeNotAvail", "Resources")]
    for name, reason in [*waits, ("RUNNING", "None"), ("RUNNING", "None"), ("REQUEUED", "BeginTime")]:
        update(job, State(name, reason, "n1"), said.append)
    waited = [f"job 7 waits in the queue ({reason})" for reason in ("Priority", "ReqNodeNotAvail", "Resources")]
    assert said == [*waited, "job 7 runs on n1", "job 7 waits in the queue (BeginTime)"]


KILLED = "srun: error: n1: task 1: Killed"


@pytest.mark.parametrize(
    ("state", "reports", "said", "words"),
    [
        (State("FAILED", "NonZeroExitCode", "n1"), [PEER, RAISED], "", "rank 1 raised\nValueError: bad luck"),
        (State("FAILED", "NonZeroExitCode", "n1"), [PEER, None], KILLED, "job 7 ended as FAILED (NonZeroExitCode); "
         "rank 1 was killed by signal 9 (SIGKILL). If nobody killed it, the machine ran out of memory"),
        (State("FAILED", "NonZeroExitCode", "n1"), [PEER, None], KILLED, f"\nFrom {{folder}}/7.err:\n{KILLED}"),
        (State("FAILED", "None", "n1"), [None, PEER], "srun: error: n2: task 1: Exited with exit code 1\nsrun: error: "
         "n1: tasks 0,2: Segmentation fault (core dumped)", "rank 0 was killed by signal 11 (SIGSEGV)\nFrom"),
        (State("FAILED", "None", "n1"), [PEER, None], "srun: error: n1: task 1: Exited with exit code 3",
         "rank 1 ended with exit code 3 before its work was done"),
        (State("CANCELLED", "None", "n1"), [None, None], KILLED, "; ended without a report, as if killed: rank 0, 1"),
        (State("CANCELLED", "None", "n1"), [None, None], "", "job 7 ended as CANCELLED (None); ended without a report"),
        (State("FAILED", "None", "n1"), [None, None], "srun: error: n1: task 0: Out Of Memory", "launcher.mem_gb"),
        (State("TIMEOUT", "TimeLimit", "n1"), [RAISED, None], "", "set launcher.time_min or launcher.signal_s higher"),
        (State("COMPLETED", "None", "n1"), [{}, None], "", "ended without a report, as if killed: rank 1"),
    ],
)  # fmt: skip
def test_why_a_job_ended_is_its_first_failure_or_what_the_queue_says(tmp_path, state, reports, said, words):
    for rank, report in enumerate(reports):
        if report is not None:
            (tmp_path / f"7_{rank}.json").write_text(json.dumps(report))
    (tmp_path / "7.err").write_text(said)
    assert words.format(folder=tmp_path) in str(explain(Job("7", tmp_path, tmp_path, 2), state))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Slurm(signal_s=300, time_min=5), "launcher.signal_s=300 is not below the time limit"),
        (Slurm(nodes=0), "launcher.nodes=0 must be at least 1"),
        (Slurm(sbatch="--exclusive"), "launcher.sbatch=--exclusive must be a mapping, such as"),
        (Slurm(sbatch={"output": "x", "ntasks_per_node": 2}), "launcher.sbatch: ntasks-per-node, output cannot be set"),
        (Slurm(nodes=3), "2 processes .* cannot be divided equally among launcher.nodes=3"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_queued(answer, tmp_path, options, words):
    commands = answer()
    with pytest.raises(LaunchError, match=words):
        submitting.check_options(options)
        submit(tmp_path, options)
    assert commands == []


def test_a_container_is_an_option_of_srun_and_its_python_runs(answer, tmp_path):
    commands = answer(stdout="7\n")
    container = {"container_image": "nvcr.io#nvidia/pytorch:25.06-py3", "container-mounts": "/a b:/c", "nice": 5}
    submit(tmp_path, Slurm(sbatch={**container, "no_container_mount_home": True, "get_user_env": "5L"}))
    assert {"--nice=5", "--get-user-env=5L"} < set(commands[-1])
    assert not [word for word in commands[-1] if "--container" in word or "--no-" in word], (
        "the script calls srun, which no image has"
    )
    words = run_by_bash(tmp_path, 'printf "%s\\n" "$@"', commands[-1][-1]).splitlines()
    image, mounts = "--container-image=nvcr.io#nvidia/pytorch:25.06-py3", "--container-mounts=/a b:/c"
    assert words[4:10] == [image, mounts, "--no-container-mount-home", "env", "--block-signal=USR2", "python"]


@pytest.mark.parametrize(
    ("restarts", "steps", "refusal", "words"),
    [
        (1, 3, "", "has not ended this attempt"),
        (1, 0, "", "has trained no step since"),
        (0, 0, "Invalid job id", "scontrol requeue: Invalid job id"),
    ],
)
def test_a_job_that_was_queued_again_and_has_trained_no_step_is_not_queued_again(
    answer, monkeypatch, restarts, steps, refusal, words
):
    commands = answer(bool(refusal), stderr=refusal)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    monkeypatch.setattr(task, "_KILLED_S", 0.0)
    with pytest.raises(LaunchError, match=words), task.requeued(World.alone()):
        raise Stopped("stopped", steps=steps)
    assert commands == [["scontrol", "requeue", "7"]] * (steps > 0 or restarts == 0)


def test_a_machine_without_slurm_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch not found: launcher=slurm works on machines from which SLURM's"):
        submit(tmp_path)


@pytest.mark.parametrize(
    "restarts, typed, saved, added",
    [
        ("0", ["train.resume=runs/a"], False, False),
        ("1", ["model=toy"], False, True),
        ("1", ["train.resume=runs/a"], False, False),  # before its first checkpoint it begins where it began
        ("1", ["train.resume=runs/a"], True, True),
    ],
)
def test_a_job_of_ones_own_that_is_queued_again_goes_on(tmp_path, restarts, typed, saved, added):
    if saved:
        (tmp_path / "outputs/slurm-7/checkpoints/step-00000002").mkdir(parents=True)
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
    said = run_by_bash(tmp_path, "echo $*", submitting._TEMPLATE, *typed, **environ)
    assert said.split()[-1 - len(typed) - added :] == [
        "hydra.run.dir=outputs/slurm-7", *typed, *["train.resume=auto"] * added
    ]  # fmt: skip
