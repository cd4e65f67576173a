"""``launcher=slurm`` and ``sbatch launchers/train.sbatch``, as a user types them, give the losses of one machine."""

import os
import re
import sys

import pytest
from commandline import Run, environment, wait_until
from slurm_commands import TOY, TWO_NODES, Job, ask, queue

pytestmark = pytest.mark.slurm


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


def test_without_waiting_the_command_returns_at_once_and_says_how_to_follow(cluster, tmp_path):
    toy = [*TOY, "logger=none", "train.steps=2", "launcher.wait=false"]
    layouts = {"ddp": ["parallel=ddp", "parallel.dp=2"], "single": ["launcher.nodes=1", "parallel=single"]}
    for name, layout in layouts.items():
        folder = tmp_path / name
        run = train(cluster, [*TWO_NODES, *toy, *layout], folder)
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
