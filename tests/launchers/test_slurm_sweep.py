"""``-m … launcher=slurm``: one array, one table, and a job that fails does not end the others."""

import json
import re

import pytest
from slurm_commands import TOY, TWO_NODES, Job, queue

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

RUN = [*TOY, "parallel=pipelined", "train.steps=3", "train.global_batch_size=16", *TWO_NODES]
GRIDS = {
    "good": ["parallel.chunks=1,2,4"],
    # One of each pair cannot be cut, which is known before; one of the others fails in its job.
    "bad": ["parallel.chunks=2,3", "optim.lr=0.01,1e30", "train.steps=20", "train.max_skipped=0", "logger=none"],
}


@pytest.fixture(scope="module")
def sweeps(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps")
    started = {
        name: Job(cluster, ["-m", *RUN, *grid, f"hydra.sweep.dir={folder / name}"], folder / name, own_folder=False)
        for name, grid in GRIDS.items()
    }
    try:
        yield {name: sweep.wait(200) for name, sweep in started.items()}
    finally:
        for sweep in started.values():
            sweep.kill()


def statuses(sweep, count):
    return [json.loads((sweep.folder / str(n) / "job.json").read_text())["status"] for n in range(count)]


def test_the_jobs_are_one_array(sweeps):
    assert re.search(r"^jobs (\d+)_0, \1_1, \1_2 queued", sweeps["good"].stdout, re.MULTILINE)


def test_it_ends_with_one_table_and_code_0(sweeps):
    sweep = sweeps["good"]
    assert sweep.code == 0, sweep.console
    assert statuses(sweep, 3) == ["finished"] * 3
    assert (sweep.folder / "sweep.csv").read_text().count("\n") == 4


def test_jobs_that_fail_here_or_there_are_shown_and_the_others_finish(sweeps):
    sweep = sweeps["bad"]
    assert sweep.code == 1
    assert statuses(sweep, 4) == ["finished", "failed", "failed", "failed"]
    assert re.search(r"^jobs (\d+)_0, \1_1 queued", sweep.stdout, re.MULTILINE)
    assert "train.global_batch_size=16 cannot be cut into dp=1 x chunks=3" in sweep.stderr
    assert "not finite for 1 steps in a row" in sweep.stderr, "of the job that failed in its processes"
    assert (sweep.folder / "sweep.csv").read_text().count("\n") == 5


def test_nothing_stays_in_the_queue(sweeps, cluster):
    assert queue(cluster) == ""
