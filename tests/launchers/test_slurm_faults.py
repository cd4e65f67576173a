"""However a job ends, the command that queued it says why and ends with code 1, and nothing stays in the queue."""

import os
import signal
import time

import pytest
from commandline import wait_until
from slurm_commands import TOY, TWO_NODES, Job, ask, queue

from conf.schema import Slurm
from launchers import Interrupted
from launchers.slurm.follow import wait
from launchers.slurm.submit import submit

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

ENDLESS = [*TOY, "logger=none", "train.steps=100000000", *TWO_NODES]
TWO_RANKS = ["parallel=ddp", "parallel.dp=2"]
COMMANDS = {
    "raise": TWO_RANKS,
    "leave": ["parallel=pipe_ddp"],
    "kill": TWO_RANKS,
    "cancel": TWO_RANKS,
    "memory": [*TWO_RANKS, "launcher.mem_gb=1000"],
}
STRIKES = {
    "raise": lambda job: os.kill(job.rank(1), signal.SIGRTMIN + 1),
    "leave": lambda job: os.kill(job.rank(3), signal.SIGRTMIN + 2),
    "kill": lambda job: os.kill(job.rank(1), signal.SIGKILL),
    "cancel": lambda job: job.tell_slurm("scancel"),
}
WORDS = {
    "raise": ["error: rank 1 raised\nTraceback", "ValueError: bad luck"],
    "leave": ["error: job ", "ended without a report, as if killed: rank 3"],
    "kill": ["error: job ", "rank 1 was killed by signal 9 (SIGKILL)", "srun: "],
    "cancel": ["error: job ", " ended as CANCELLED"],
    "memory": ["the queue does not accept the job: ", "Memory specification can not be satisfied"],
}


@pytest.fixture(scope="module")
def ended(cluster, tmp_path_factory):
    """All commands at once, each struck as soon as it has made some steps: name -> (run, seconds until its end)."""
    folder = tmp_path_factory.mktemp("faults")
    jobs = {name: Job(cluster, [*ENDLESS, *words], folder / name) for name, words in COMMANDS.items()}
    begin = {name: time.monotonic() for name in COMMANDS.keys() - STRIKES.keys()}
    found, deadline = {}, time.monotonic() + 200
    try:
        while len(found) < len(jobs) and time.monotonic() < deadline:
            for name, job in jobs.items():
                if name not in begin and job.steps() >= 5:
                    STRIKES[name](job)
                    begin[name] = time.monotonic()
                if name not in found and job.process.poll() is not None:
                    found[name] = job.wait(), time.monotonic() - begin.get(name, 0.0)
            time.sleep(0.1)
        yield found
    finally:
        for job in jobs.values():
            job.kill()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_says_why_within_a_minute_and_ends_with_code_1(ended, name):
    assert name in ended, f"no end; {sorted(ended)} have ended"
    run, seconds = ended[name]
    assert [words for words in WORDS[name] if words not in run.stderr] == [], run.console
    assert run.code == 1
    assert seconds < 60


def test_nothing_stays_in_the_queue_and_no_accounting_was_asked(ended, cluster):
    assert queue(cluster) == ""
    assert "accounting_storage/none" in ask(cluster, "scontrol", "show", "config")


def test_ctrl_c_cancels_what_was_queued(cluster, tmp_path):
    options, sleep = Slurm(nodes=2, mem_gb=0.2, time_min=5, poll_s=0.5), ["-c", "import time; time.sleep(60)"]
    jobs = submit(sleep, [tmp_path] * 2, options, 4, tmp_path / "slurm", "test")
    assert [job.id.partition("_")[2] for job in jobs] == ["0", "1"], "one array"
    tell = lambda line: os.kill(os.getpid(), signal.SIGINT) if "runs on" in line else None  # noqa: E731
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Interrupted, match=f"stopped by SIGINT; jobs {jobs[0].id}, {jobs[1].id} cancelled"):
            wait(jobs, 0.3, tell)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until(lambda: queue(cluster) == "", 30, "an empty queue")
