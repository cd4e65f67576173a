"""``launcher=slurm`` and ``sbatch launchers/train.sbatch``, as a user types them, give the losses of one machine. Of a
sweep is made one array with one table, and a job that fails does not end the others."""

import json
import os
import re
import sys

import pytest
from commandline import Run, environment, wait_until
from slurm_commands import TOY, TWO_NODES, Job, ask, queue

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def train(cluster, overrides, folder):
    job = Job(cluster, overrides, folder)
    try:
        return job.wait()
    finally:
        job.kill()


def test_two_nodes_give_the_losses_of_one_machine(cluster, recipe, local_losses, tmp_path):
    run = train(cluster, [*recipe, *TWO_NODES], tmp_path / "run")
    assert run.code == 0, run.console
    assert run.losses == pytest.approx(local_losses(), rel=1e-6)
    assert "n1: ranks 0-1   n2: ranks 2-3" in run.stdout
    assert "2 nodes x 2 processes" in run.stdout
    assert "best validation loss" in run.stdout, "rank 0's output is shown"
    assert run.summary["world_size"] == 4
    assert queue(cluster) == ""


def test_the_ranks_of_each_node_share_the_layers_and_nodes_are_replicas(cluster, recipe, local_losses, tmp_path):
    shared = ["parallel=ddp", "parallel.dp=2", "parallel.tp=2", "parallel.sequence=true"]
    run = train(cluster, [*recipe[1:], *shared, *TWO_NODES], tmp_path / "run")
    assert run.code == 0, run.console
    assert run.losses == pytest.approx(local_losses(), rel=1e-5)
    assert (run.summary["world_size"], run.summary["tp"]) == (4, 2)


def test_a_job_takes_the_layout_that_is_planned_for_its_nodes(cluster, tmp_path):
    words = [*TOY, "logger=none", "train.steps=3", "parallel=auto", "cluster=laptop", *TWO_NODES]
    run = train(cluster, words, tmp_path / "run")
    assert run.code == 0, run.console
    chosen = json.loads((tmp_path / "run" / "choices.json").read_text())
    assert "is predicted to be the fastest" in run.stdout and run.summary["world_size"] == 4
    assert (chosen["name"], chosen["dp"], chosen["pp"]) == tuple(run.summary[key] for key in ("parallel", "dp", "pp"))


def test_without_waiting_the_command_returns_at_once_and_says_how_to_follow(cluster, tmp_path):
    toy = [*TOY, "logger=none", "train.steps=2", "launcher.wait=false"]
    folder = tmp_path / "run"
    run = train(cluster, [*TWO_NODES, *toy, "launcher.nodes=1", "parallel=single"], folder)
    assert run.code == 0, run.console
    job = re.search(r"^job (\d+) is queued", run.stdout, re.MULTILINE).group(1)
    assert f"follow: tail -F {folder}/slurm/{job}.out" in run.stdout
    assert f"scancel {job}" in run.stdout
    assert not (folder / "summary.json").exists(), "returned before the job's end"
    wait_until((folder / "summary.json").exists, 90, "the job's end")
    wait_until(lambda: queue(cluster) == "", 60, "an empty queue")


def test_a_batch_script_of_ones_own_gives_the_same_losses(cluster, recipe, local_losses, tmp_path, monkeypatch):
    # The script calls the python that it finds.
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)
    output, folder = tmp_path / "out", tmp_path / "run"
    words = ["launchers/train.sbatch", *recipe, f"hydra.run.dir={folder}"]
    job = ask(cluster, "sbatch", "--parsable", "--nodes=2", "--mem=2G", f"--output={output}", *words).strip()
    show = ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}"]
    wait_until(lambda: ask(cluster, *show).strip() not in ("PENDING", "RUNNING", "COMPLETING"), 150, "the job's end")
    assert ask(cluster, *show).strip() == "COMPLETED", output.read_text()
    assert Run(0, "", "", 0.0, folder).losses == pytest.approx(local_losses(), rel=1e-6)
    assert "n1: ranks 0-1   n2: ranks 2-3" in output.read_text()


# -- sweeps ------------------------------------------------------------------------------------------------------------

SWEEP = [*TOY, "parallel=pipelined", "train.steps=3", "train.global_batch_size=16", *TWO_NODES]
GRIDS = {
    "good": ["parallel.chunks=1,2,4"],
    "repeated": ["seed=1,2"],
    # One of each pair cannot be cut, which is known before; one of the others fails in its job.
    "bad": ["parallel.chunks=2,3", "optim.lr=0.01,1e30", "train.steps=20", "train.max_skipped=0", "logger=none"],
}


@pytest.fixture(scope="module")
def sweeps(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps")
    started = {
        name: Job(cluster, ["-m", *SWEEP, *grid, f"hydra.sweep.dir={folder / name}"], folder / name, own_folder=False)
        for name, grid in GRIDS.items()
    }
    try:
        yield {name: sweep.wait(200) for name, sweep in started.items()}
    finally:
        for sweep in started.values():
            sweep.kill()


def statuses(sweep, count):
    return [json.loads((sweep.folder / str(n) / "job.json").read_text())["status"] for n in range(count)]


def test_the_jobs_are_one_array_which_ends_with_one_table_and_code_0(sweeps, cluster):
    sweep = sweeps["good"]
    assert sweep.code == 0, sweep.console
    assert re.search(r"^jobs (\d+)_0, \1_1, \1_2 queued", sweep.stdout, re.MULTILINE)
    assert statuses(sweep, 3) == ["finished"] * 3
    assert (sweep.folder / "sweep.csv").read_text().count("\n") == 4
    assert queue(cluster) == ""


def test_repetitions_in_an_array_are_averaged(sweeps):
    sweep = sweeps["repeated"]
    assert sweep.code == 0, sweep.console
    assert (sweep.folder / "sweep.csv").read_text().count("\n") == 2
    assert "means over seed" in sweep.stdout and re.search(r"^0 1 +2 of 2 finished", sweep.stdout, re.MULTILINE)


def test_jobs_that_fail_here_or_there_are_shown_and_the_others_finish(sweeps):
    sweep = sweeps["bad"]
    assert sweep.code == 1
    assert statuses(sweep, 4) == ["finished", "failed", "failed", "failed"]
    assert re.search(r"^jobs (\d+)_0, \1_1 queued", sweep.stdout, re.MULTILINE)
    assert "train.global_batch_size=16 cannot be cut into dp=1 x chunks=3" in sweep.stderr
    assert "not finite for 1 steps in a row" in sweep.stderr, "of the job that failed in its processes"
    assert (sweep.folder / "sweep.csv").read_text().count("\n") == 5
