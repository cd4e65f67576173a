"""An outside process between two ranks, which replaces their messages, can end the run and can execute nothing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("relayed.py")


def relayed(talk, folder):
    """Two ranks and a relay between them: (exit codes, standard errors, whether the relay's command was run)."""
    mark = folder / "executed"
    command = [str(folder / "store"), talk, str(mark)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen([sys.executable, SCRIPT, str(rank), *command], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert any("replaced" in text for text in errors), errors
    return [rank.returncode for rank in ranks], "".join(errors), mark.exists()


def test_the_relay_executes_code_where_ranks_send_each_other_pickles(tmp_path):
    """Otherwise the test below would show nothing."""
    _, errors, executed = relayed("pickles", tmp_path)
    assert executed, errors


def test_a_relay_ends_the_run_with_an_error_and_executes_nothing(tmp_path):
    codes, errors, executed = relayed("json", tmp_path)
    assert not executed
    assert 1 in codes and "a rank sent a message that is not JSON" in errors and "SECURITY.md" in errors, errors
