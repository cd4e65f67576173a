"""Ranks of torchrun when it starts them again, and when it is gone."""

import os
import signal

import psutil
import pytest
from commandline import Started, wait_until

from training.app import _typed_timeout

LAUNCH = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
RECIPE = [
    "parallel=ddp", "logger=none", "device=cpu", "train.epochs=null", "train.checkpoint_every=20",
    "train.eval_every=null",
]  # fmt: skip
START_S = 120


@pytest.mark.parametrize(
    "word, seconds",
    [
        ("seed=1", 300.0),
        ("parallel.timeout_s=7.5", 7.5),
        ("parallel.timeout_s=inf", 300.0),
        ("parallel.timeout_s", 300.0),
    ],
)
def test_a_rank_waits_for_rank_0_as_long_as_its_own_command_line_says(word, seconds):
    assert _typed_timeout(["model=toy", word]) == seconds


def has_checkpoint(folder):
    return lambda: any(folder.glob("**/checkpoints/latest"))


@pytest.mark.slow
def test_ranks_whose_torchrun_was_killed_save_and_leave(tmp_path):
    one = Started([*RECIPE, "train.steps=10000000"], tmp_path / "run", prefix=LAUNCH)
    try:
        wait_until(has_checkpoint(tmp_path / "run"), START_S, "a checkpoint")
        ranks = one.launched()
        one.process.kill()
        wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks), 30, "the end")
        ended = one.wait()
        step = ended.steps[-1]["step"]
        assert f"stopped after step {step} of 10000000, saved in" in ended.stderr
        assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == f"step-{step:08d}"
    finally:
        for process in ranks:
            if process.is_running():
                process.kill()
        one.kill()


@pytest.mark.slow
@pytest.mark.parametrize("own_folder", [True, False], ids=["a directory of the user's", "the default directory"])
def test_a_run_that_torchrun_starts_again_goes_on_by_itself(tmp_path, own_folder):
    launch = [*LAUNCH, "--max-restarts", "1"]
    one = Started([*RECIPE, "train.steps=3000"], tmp_path / "run", prefix=launch, cwd=tmp_path, own_folder=own_folder)
    folder = tmp_path / ("run" if own_folder else "outputs")
    try:
        wait_until(has_checkpoint(folder), START_S, "a checkpoint")
        os.kill(one.launched()[1].pid, signal.SIGKILL)
        ended = one.wait(180)
        assert ended.code == 0, ended.console
        (metrics,) = folder.glob("**/metrics.jsonl")
        ended.folder = metrics.parent
        assert [line["step"] for line in ended.steps] == list(range(1, 3001))
        assert "going on from" in ended.stdout
    finally:
        one.kill()
