"""Sweeps through the command line: independent jobs, one table of all, and continuing an interrupted sweep."""

import csv
import shutil

import numpy as np
import pytest
from commandline import train

QUICK = ["-m", "train.epochs=null", "train.eval_every=null", "device=cpu"]
GRID = [*QUICK, "train.steps=6", "parallel.chunks=1,3,2", "train.checkpoint_every=4"]


def jobs(folder):
    return list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))


def statuses(folder):
    return [row["status"] for row in jobs(folder)]


def sweep(folder, *overrides, tag="console"):
    return train([*overrides, f"hydra.sweep.dir='{folder}'"], folder, own_folder=False, tag=tag)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Chunks 1, 3 and 2 of a batch of 64, with wandb; 64 cannot be cut into 3."""
    return sweep(tmp_path_factory.mktemp("sweep") / "three", *GRID)


def test_one_bad_job_leaves_the_others_alone_and_the_exit_code_tells(three):
    assert three.code == 1
    assert statuses(three.folder) == ["finished", "failed", "finished"]
    assert "train.global_batch_size=64 cannot be cut into dp=1 x chunks=3" in jobs(three.folder)[1]["error"]
    assert "error: job 1: train.global_batch_size=64 cannot be cut" in three.stderr
    assert "Traceback" not in three.console


def test_the_table_has_overrides_and_results_and_is_printed_at_the_end(three):
    first, _, last = jobs(three.folder)
    assert (first["parallel.chunks"], last["parallel.chunks"]) == ("1", "2")
    assert float(first["step_time_s"]) > 0 and float(first["final_loss"]) == pytest.approx(float(last["final_loss"]))
    table = three.stdout.splitlines()[-5:]
    assert table[0].startswith("job  parallel.chunks  status") and table[2].startswith("1    3                failed: ")
    assert table[-1] == f"files: {three.folder}: sweep.csv sweep.tex sweep.png curves.png report.html"
    assert (three.folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "python train.py -m train.epochs=null" in (three.folder / "report.html").read_text()


def test_each_job_has_processes_of_its_own_even_where_one_is_enough(three):
    """Then its peak memory is its own."""
    assert three.stdout.count("1 process on cpu") == 2
    first, _, last = jobs(three.folder)
    peaks = [int(row["peak_memory_bytes_sum"]) for row in (first, last)]
    assert peaks[1] < 1.1 * peaks[0]


def test_wandb_gets_the_jobs_as_one_group_named_by_what_differs(three):
    for num, chunks in (("0", "1"), ("2", "2")):
        (file,) = (three.folder / num).glob("wandb/offline-run-*/*.wandb")
        content = file.read_bytes()
        assert b"three" in content and f"parallel.chunks={chunks}".encode() in content


@pytest.mark.slow
def test_the_same_command_runs_only_what_has_not_finished_which_goes_on_from_its_checkpoint(three):
    finished, stopped = (three.folder / name / "metrics.jsonl" for name in "02")
    before, losses = finished.stat().st_mtime_ns, stopped.read_text().count('"loss"')
    job = stopped.with_name("job.json")
    job.write_text(job.read_text().replace('"finished"', '"interrupted"'))
    stopped.with_name("summary.json").unlink()
    shutil.rmtree(three.folder / "2/checkpoints/step-00000006")
    again = sweep(three.folder, *GRID, tag="again")
    assert again.code == 1
    assert "job 0 is finished" in again.stdout and "job 2 is finished" not in again.stdout
    assert finished.stat().st_mtime_ns == before
    assert "resuming from" in again.stdout and "step-00000004" in again.stdout
    assert stopped.read_text().count('"loss"') == losses == 6
    assert statuses(three.folder) == ["finished", "failed", "finished"]


def test_a_secret_is_masked_where_all_jobs_have_finished_too(three):
    secret = "0123456789abcdef0123456789abcdef01234567"
    again = sweep(three.folder, *QUICK, "train.steps=6", "parallel.chunks=1,2", "train.checkpoint_every=4",
                  f"+parallel.env.WANDB_API_KEY={secret}", tag="with a secret")  # fmt: skip
    assert secret not in again.console + (three.folder / "multirun.yaml").read_text(), again.console


@pytest.mark.slow
def test_seeds_are_averaged_and_jobs_that_failed_are_left_out_and_said(tmp_path):
    words = [*QUICK[:2], "device=cpu", "train.steps=4", "train.eval_every=2", "logger=none", "train.max_skipped=0"]
    done = sweep(tmp_path / "s", *words, "seed=1,2", "optim.lr=0.01,0.02,1e30")
    assert done.code == 1, done.console
    every = list(csv.DictReader((done.folder / "jobs.csv").read_text().splitlines()))
    for line in jobs(done.folder):
        values = [float(job["val_loss"]) for job in every if job["optim.lr"] == line["optim.lr"] and job["val_loss"]]
        assert int(line["n"]) == len(values) == (0 if line["optim.lr"] == "1e+30" else 2)
        if values:
            assert float(line["val_loss"]) == pytest.approx(np.mean(values))
            assert float(line["val_loss_std"]) == pytest.approx(np.std(values, ddof=1))
    assert "Best: optim.lr=0.02 with val_loss" in done.stdout and "0 of 2 finished; job 2 failed:" in done.stdout
