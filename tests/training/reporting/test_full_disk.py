"""A real full disk: a small tmpfs under a run of the command line. Training goes on, and what is good stays good."""

import subprocess

import pytest
from commandline import train, wait_until

from training.checkpoint.files import Checkpoint

START_S = 120
# Some seconds, of which the disk is full for most.
STEPS = 1500
SAVE_EVERY = 50
RECIPE = ["train.epochs=null", f"train.steps={STEPS}", f"train.checkpoint_every={SAVE_EVERY}", "train.eval_every=null"]


def fill(folder):
    """A file that leaves not one byte."""
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    return path


@pytest.fixture
def begin(start):
    """``begin(run directory, …)``: a run from its first checkpoint on; the console is not on that disk."""

    def run_in(folder, *overrides):
        words = [*RECIPE, *overrides, f"hydra.run.dir='{folder}'"]
        run = start(*words, own_folder=False, until=lambda run: any(folder.glob("checkpoints/step-*")))
        run.folder = folder
        return run

    return run_in


def until(run, tmp_path, words):
    def said():
        assert run.process.poll() is None, f"it ended before '{words}'"
        return any(words in (tmp_path / f"run.console.{kind}").read_text() for kind in ("out", "err"))

    wait_until(said, START_S, words)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "ddp"])
def test_a_disk_that_is_full_for_a_while_costs_nothing_but_a_warning(layout, small_disk, begin, tmp_path):
    root = small_disk("8m")
    run = begin(root / "run", f"parallel={layout}")
    filler = fill(root)
    until(run, tmp_path, "the checkpoint of step")
    until(run, tmp_path, "metrics.jsonl: No space left")
    assert Checkpoint.newest(run.folder / "checkpoints", True, pytest.fail) is not None
    filler.unlink()
    ended = run.wait()
    assert ended.code == 0, ended.console
    assert [line["step"] for line in ended.steps] == list(range(1, STEPS + 1)), "no line is lost, none is doubled"
    for words in (str(root), "free", "training goes on"):
        assert words in ended.console
    assert Checkpoint.newest(run.folder / "checkpoints", True, pytest.fail).step == STEPS
    assert ended.summary["steps"] == STEPS


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_with_an_error_and_the_last_good_checkpoint_loads(
    small_disk, begin, tmp_path
):
    root = small_disk("8m")
    run = begin(root / "run", "parallel=single")
    fill(root)
    ended = run.wait()
    assert ended.code not in (0, 75), ended.console
    assert f"the checkpoint of step {STEPS} could not be written" in ended.stderr
    assert str(root) in ended.stderr and "free" in ended.stderr
    assert "Traceback" not in ended.stderr
    good = Checkpoint.newest(run.folder / "checkpoints", True, pytest.fail).folder
    again = train(["mode=eval", f"checkpoint='{good}'", "logger=none", "device=cpu"], tmp_path / "eval")
    assert again.code == 0, again.console


@pytest.mark.parametrize("reason", ["Read-only file system", "No space left on device"])
def test_a_run_directory_that_cannot_be_written_is_an_error_before_anything_starts(reason, small_disk, tmp_path):
    root = small_disk("1m")
    if reason == "Read-only file system":
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True, timeout=20)
    else:
        fill(root)
    ended = train([f"hydra.run.dir='{root}/run'"], tmp_path / "run", own_folder=False)
    assert ended.code == 1
    assert ended.stderr.startswith(f"error: the run directory {root}/run cannot be written: {reason}; ")
    assert "MiB are free" in ended.stderr and "hydra.run.dir" in ended.stderr
