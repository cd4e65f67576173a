"""A console that cannot be printed to ends no run."""

import errno
import subprocess
import sys

import pytest
from commandline import ROOT, TRAIN, environment

import train as command

FEW = ["logger=none", "device=cpu", "train.epochs=null", "train.steps=3", "train.eval_every=1"]


class Broken:
    """Standard output whose reader is gone."""

    encoding = "utf-8"

    def write(self, text=""):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    flush = write

    def isatty(self):
        return False


def test_a_run_without_a_reader_finishes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Broken())
    monkeypatch.setattr(sys, "stderr", Broken())
    assert command.main([*FEW, f"hydra.run.dir={tmp_path}/run"]) == 0
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    "layout, console",
    [
        pytest.param("single", ">&- 2>&- <&-", id="all descriptors closed", marks=pytest.mark.slow),
        pytest.param("ddp", ">/dev/full 2>&1", id="a full disk under all ranks"),
        pytest.param("ddp", "2>&1 | true; exit ${PIPESTATUS[0]}", id="a closed pipe", marks=pytest.mark.slow),
    ],
)
def test_a_console_that_is_closed_or_full_changes_no_exit_code(tmp_path, layout, console):
    words = [*FEW, f"parallel={layout}", "launcher.max_restarts=1", f"hydra.run.dir={tmp_path}/run"]
    script = f'"$0" "$@" {console}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, str(TRAIN), *words],
        cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "summary.json").exists()
