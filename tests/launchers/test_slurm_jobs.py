"""Jobs on a real SLURM: however one ends, it is told why, and nothing stays in the queue."""

import os
import signal
import subprocess

import pytest

from conf.schema import Slurm
from launchers import Interrupted, LaunchError
from launchers.slurm import submit, wait

pytestmark = pytest.mark.slurm


def options(**changes):
    return Slurm(**{"nodes": 2, "mem_gb": 0.5, "time_min": 5, "poll_s": 0.5, **changes})


def start(folder, *kinds, processes=4, env=None, **changes):
    logs = [folder / kind for kind in kinds]
    command = ["-m", "slurm_jobs", str(folder), *kinds]
    return submit(command, logs, options(**changes), processes, folder / "slurm", "test", env)


def queue():
    return subprocess.run(["squeue", "--noheader", "--array"], capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def array(cluster, tmp_path_factory):
    """Jobs that end in every way, as one array; one of them is cancelled while it runs."""
    folder = tmp_path_factory.mktemp("array")
    jobs = dict(zip(kinds := ("fine", "raise", "exit", "cancel"), start(folder, *kinds), strict=True))

    def tell(line):
        if line.startswith(f"job {jobs['cancel'].id} runs on"):
            subprocess.run(["scancel", jobs["cancel"].id], check=True)

    wait(list(jobs.values()), 0.5, tell)
    return jobs


def test_a_sweep_is_one_array(array):
    numbers = [job.id.split("_") for job in array.values()]
    assert len({number for number, _ in numbers}) == 1
    assert [index for _, index in numbers] == ["0", "1", "2", "3"]


def test_one_job_of_an_array_finishes_whatever_becomes_of_the_others(array):
    assert array["fine"].error is None


def test_the_traceback_of_a_rank_other_than_0_is_shown(array):
    error = str(array["raise"].error)
    assert error.startswith("rank 2 raised\nTraceback")
    assert "in fail" in error
    assert "ValueError: bad luck" in error


def test_a_rank_that_leaves_without_a_word_is_named(array):
    assert "rank 2 left with exit code 3" in str(array["exit"].error)


def test_a_job_that_somebody_cancels_is_reported(array):
    job = array["cancel"]
    assert str(job.error) == f"job {job.id} was cancelled"


def test_the_queue_is_empty_then(array):
    assert queue() == ""


def test_more_nodes_than_there_are_are_waited_for_no_longer_than_minutes(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("launchers.slurm._NEVER_S", 3.0)
    (job,) = start(tmp_path, "fine", processes=6, nodes=3)
    said = []
    wait([job], 0.5, said.append)
    assert "(PartitionNodeLimit: it asks for more nodes than the partition has; it is cancelled if" in said[-1]
    assert f"job {job.id} does not start: it asks for more nodes than the partition has; it waited" in str(job.error)
    assert queue() == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mem_gb": 1000}, "Memory specification can not be satisfied"),
        ({"partition": "nowhere"}, "invalid partition"),
        ({"sbatch": {"constraint": "gold"}}, "the queue does not take the job: "),
        ({"cpus_per_task": 64}, "needs 128 CPUs per node, .* 0 of the partition's 2 nodes .* the largest has 8"),
        ({"signal_s": 300}, "launcher.signal_s=300 is not below the time limit"),
        ({"tasks_per_node": 3}, "launcher.nodes=2 x launcher.tasks_per_node=3 = 6 processes, but the run has 4"),
        ({"nodes": 3}, "4 processes .* cannot be dealt equally to launcher.nodes=3"),
    ],
)
def test_what_the_queue_or_arithmetic_refuses_is_an_error_at_once(cluster, tmp_path, changes, words):
    with pytest.raises(LaunchError, match=words):
        start(tmp_path, "fine", **changes)
    assert queue() == ""


def test_a_job_that_the_queue_forgets_is_reported(cluster, tmp_path, monkeypatch):
    (job,) = start(tmp_path, "linger")
    monkeypatch.setattr("launchers.slurm._UNKNOWN_S", 0.5)
    monkeypatch.setattr("launchers.slurm_queue.look", lambda jobs: {})
    wait([job], 0.2, print)
    assert f"job {job.id} has vanished from the queue without an end" in str(job.error)
    subprocess.run(["scancel", job.id])


def test_ctrl_c_cancels_what_was_queued(cluster, tmp_path):
    jobs = start(tmp_path, "linger", "linger", mem_gb=0.2)
    tell = lambda line: os.kill(os.getpid(), signal.SIGINT) if "runs on" in line else None  # noqa: E731
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(Interrupted, match=f"stopped by SIGINT; jobs {jobs[0].id}, {jobs[1].id} cancelled"):
            wait(jobs, 0.3, tell)
    finally:
        signal.signal(signal.SIGINT, before)
    assert queue() == ""
