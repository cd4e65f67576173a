"""An outside process between two ranks, which replaces their messages, can end the run and can execute nothing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("relayed.py")


def test_a_relay_ends_the_run_with_an_error_and_executes_nothing(tmp_path):
    mark = tmp_path / "executed"
    command = [str(tmp_path / "store"), str(mark)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen([sys.executable, SCRIPT, str(rank), *command], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = "".join(rank.communicate(timeout=100)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert "replaced" in errors and 1 in [rank.returncode for rank in ranks], errors
    assert not mark.exists()
