"""What a real SLURM refuses is said, and nothing stays in the queue."""

import os
import signal
import subprocess

import pytest
from commandline import wait_until

from conf.schema import Slurm
from launchers import Interrupted, LaunchError
from launchers.slurm.follow import wait
from launchers.slurm.submit import submit

pytestmark = pytest.mark.slurm


def start(folder, count=1, processes=4, **changes):
    options = Slurm(**{"nodes": 2, "mem_gb": 0.2, "time_min": 5, "poll_s": 0.5, **changes})
    return submit(["-c", "import time; time.sleep(60)"], [folder] * count, options, processes, folder / "slurm", "test")


def queue():
    return subprocess.run(["squeue", "--noheader", "--array"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": "nowhere"}, "invalid partition"),
        ({"sbatch": {"constraint": "gold"}}, "the queue does not take the job: "),
    ],
)
def test_what_the_queue_refuses_is_an_error_at_once(cluster, tmp_path, changes, words):
    with pytest.raises(LaunchError, match=words):
        start(tmp_path, **changes)
    assert queue() == ""


def test_ctrl_c_cancels_what_was_queued(cluster, tmp_path):
    jobs = start(tmp_path, count=2)
    assert [job.id.partition("_")[2] for job in jobs] == ["0", "1"], "one array"
    tell = lambda line: os.kill(os.getpid(), signal.SIGINT) if "runs on" in line else None  # noqa: E731
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Interrupted, match=f"stopped by SIGINT; jobs {jobs[0].id}, {jobs[1].id} cancelled"):
            wait(jobs, 0.3, tell)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until(lambda: queue() == "", 30, "an empty queue")
