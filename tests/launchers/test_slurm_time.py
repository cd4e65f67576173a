"""A job whose time is over, by its limit or by preemption, saves, queues again and goes on to its end."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commandline import wait_until
from slurm_commands import TOY, TWO_NODES, Job, queue

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 500
RUN = [*TOY, f"train.steps={STEPS}", "parallel=ddp", "parallel.dp=2", *TWO_NODES]
# SLURM sends the signal 50 to 80 s before the limit of 120 s: a start on a busy machine takes half a minute.
LIMIT = ["launcher.time_min=2", "launcher.signal_s=50"]


def told_to_save(pid):
    """Whether the signal that announces the limit waits for the process: it is blocked there, and stays pending."""
    pending = re.search(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(pending.group(1), 16) >> (signal.SIGUSR2 - 1) & 1


def hold(job):
    """Stop a rank after its first steps, so that the others wait for it."""
    wait_until(lambda: job.steps() > 20, 120, "some steps")
    pid = job.rank(1)
    os.kill(pid, signal.SIGSTOP)
    return pid


def release_at_the_limit(pid):
    """Let the rank go on as soon as SLURM has announced the limit. Later the time is over, and SLURM kills the job."""
    try:
        wait_until(lambda: told_to_save(pid), 120, "SLURM's signal")
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def lives(cluster, tmp_path_factory):
    """Three runs, each interrupted once: name -> (run, id in wandb before)."""
    folder = tmp_path_factory.mktemp("time")
    jobs = {"limit": Job(cluster, [*RUN, *LIMIT], folder / "limit")}
    try:
        with ThreadPoolExecutor(1) as pool:
            released = pool.submit(release_at_the_limit, hold(jobs["limit"]))
            jobs |= {name: Job(cluster, RUN, folder / name) for name in ("preempted", "at once")}
            # What preemption does, without a second partition.
            wait_until(lambda: jobs["at once"].number and jobs["at once"].rank(1), 120, "the processes")
            jobs["at once"].tell_slurm("scontrol", "requeue")
            wait_until(lambda: jobs["preempted"].steps() > 20, 120, "some steps")
            jobs["preempted"].tell_slurm("scontrol", "requeue")
            released.result()
        before = {name: wandb_id(job.folder) for name, job in jobs.items()}
        yield {name: (job.wait(150), before[name]) for name, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.kill()


def wandb_id(folder):
    path = folder / "wandb_id.txt"
    return path.read_text() if path.exists() else None


@pytest.mark.parametrize("name", ["limit", "preempted", "at once"])
def test_it_goes_on_to_its_end_without_a_gap_and_stays_one_run_in_wandb(lives, cluster, name):
    run, before = lives[name]
    assert run.code == 0, run.console
    assert [line["step"] for line in run.steps] == list(range(1, STEPS + 1)), "no gap, nothing twice"
    assert queue(cluster) == ""
    if name != "at once":
        assert re.search(rf"stopped after step \d+ of {STEPS}, saved in ", run.console), "before it was killed"
        assert before is not None and wandb_id(run.folder) == before


def test_at_its_limit_it_has_saved_and_queued_itself_again(lives):
    run, _ = lives["limit"]
    stops = [int(step) for step in re.findall(rf"stopped after step (\d+) of {STEPS}, saved in ", run.console)]
    assert stops == sorted(set(stops)) and stops[0] > 20
    assert "the job waits in the queue to continue" in run.stdout
