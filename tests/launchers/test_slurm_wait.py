"""A job that is queued again, and what the waiting command does about it: against a made-up queue."""

import signal
import subprocess
import time

import pytest

from common.errors import LaunchError
from launchers import slurm, slurm_queue

STOPPED_S = 0.3
BEGIN_S = 1.0  # in place of SLURM's two minutes


class Queue:
    """One job that is queued again ``times`` times and begins again when its hold is lifted, or after BEGIN_S."""

    def __init__(self, times):
        self.left, self.since, self.lifted_after = times, None, []

    def look(self, jobs):
        if self.since is not None and time.monotonic() - self.since > BEGIN_S:
            self.since = None
        elif self.since is None and self.left:
            self.left, self.since = self.left - 1, time.monotonic()
        elif self.since is None:
            return dict.fromkeys(jobs, slurm_queue.State("COMPLETED", "None", "n1"))
        state = ("RUNNING", "None", "n1") if self.since is None else ("PENDING", "BeginTime", "")
        return dict.fromkeys(jobs, slurm_queue.State(*state))

    def start_soon(self, job):
        self.lifted_after.append(time.monotonic() - self.since)
        self.since -= BEGIN_S


@pytest.fixture
def lifted(tmp_path, monkeypatch):
    """A function that waits for a job to its end; it returns how many seconds after each stop its hold was lifted."""

    def follow(times, held=False):
        queue = Queue(times)
        monkeypatch.setattr(slurm_queue, "look", queue.look)
        monkeypatch.setattr(slurm_queue, "start_soon", queue.start_soon)
        monkeypatch.setattr(slurm, "_STOPPED_S", STOPPED_S)
        (tmp_path / "7_0_result.pkl").touch()
        job = slurm.Job("7", slurm.Task((), str(tmp_path)), tmp_path, ranks=1, time_min=1, held=held)
        slurm.wait([job], 0.05, print)
        assert job.done and job.error is None
        return queue.lifted_after

    return follow


def test_a_stopped_job_goes_on_soon_but_not_in_the_second_in_which_it_was_stopped(lifted):
    after = lifted(times=3)
    assert len(after) == 3
    assert all(STOPPED_S <= seconds < BEGIN_S for seconds in after), after


def test_a_job_that_the_user_has_held_until_a_time_is_left_alone(lifted):
    assert lifted(times=1, held=True) == []


def requeue_with(monkeypatch, code, words=""):
    answer = subprocess.CompletedProcess(["scontrol"], code, "", words)
    monkeypatch.setattr(slurm_queue.subprocess, "run", lambda *args, **kwargs: answer)
    slurm_queue.requeue("7")


def test_a_requeue_that_is_stopped_with_the_job_it_stops_has_not_failed(monkeypatch):
    requeue_with(monkeypatch, 0)
    requeue_with(monkeypatch, -signal.SIGTERM)


def test_a_requeue_that_is_refused_says_why(monkeypatch):
    with pytest.raises(LaunchError, match="scontrol requeue 7: Invalid job id"):
        requeue_with(monkeypatch, 1, "Invalid job id specified")
