"""How this process's threads wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = Path(__file__).resolve().parents[2] / "train.py"


@pytest.mark.parametrize(
    "typed, spins",
    [
        ({}, "10000"),
        pytest.param({"GOMP_SPINCOUNT": "77"}, "77", marks=pytest.mark.slow),
        pytest.param({"OMP_WAIT_POLICY": "PASSIVE"}, "0", marks=pytest.mark.slow),
    ],
)
def test_threads_of_a_run_spin_for_half_a_millisecond_unless_the_environment_says_otherwise(tmp_path, typed, spins):
    kept = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    words = ["model=toy", "mode=plan", f"hydra.run.dir={tmp_path}/run"]
    env = {**kept, **typed, "OMP_DISPLAY_ENV": "verbose"}
    ended = subprocess.run([sys.executable, str(TRAIN), *words], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    if "GOMP_SPINCOUNT" not in ended.stderr:
        pytest.skip("torch here is not built with GNU OpenMP")
    assert f"GOMP_SPINCOUNT = '{spins}'" in ended.stderr


def test_the_garbage_collector_is_as_before_when_a_run_has_imported_everything(tmp_path):
    quick = ["model=toy", "train.steps=1", "train.epochs=null", "logger=none", "device=cpu"]
    code = f"""
import gc, runpy, sys
from common import machine
before, machine._RARELY = gc.get_threshold(), 77
rarely, machine.collect_rarely = machine.collect_rarely, lambda: (rarely(), print("meanwhile", gc.get_threshold()[2]))
sys.argv = {["train.py", *quick, f"hydra.run.dir={tmp_path}/run"]}
try:
    runpy.run_path({str(TRAIN)!r}, run_name="__main__")
except SystemExit:
    print("as before" if gc.get_threshold() == before else gc.get_threshold())
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=TRAIN.parent, capture_output=True, text=True)
    assert ended.stdout.splitlines()[0] == "meanwhile 77" and ended.stdout.splitlines()[-1] == "as before", ended.stderr
