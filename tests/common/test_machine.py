"""How this process's threads wait for each other, and how often it collects garbage."""

import pytest
from interpreters import ROOT, python

TRAIN = ROOT / "train.py"
TELLING = {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": None, "OMP_DISPLAY_ENV": "verbose"}


def spins(stderr):
    """How often threads look for work before they sleep, as OpenMP says it."""
    if "GOMP_SPINCOUNT" not in stderr:
        pytest.skip("torch here is not built with GNU OpenMP")
    return stderr.partition("GOMP_SPINCOUNT = '")[2].partition("'")[0]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run in a new interpreter, which says what the garbage collector is told meanwhile and afterwards."""
    folder = tmp_path_factory.mktemp("machine") / "run"
    quick = ["model=toy", "train.steps=1", "train.epochs=null", "logger=none", "device=cpu"]
    code = f"""
import gc, runpy, sys
from common import machine
before, machine._RARELY = gc.get_threshold(), 77
rarely, machine.collect_rarely = machine.collect_rarely, lambda: (rarely(), print("meanwhile", gc.get_threshold()[2]))
sys.argv = {["train.py", *quick, f"hydra.run.dir={folder}"]}
try:
    runpy.run_path({str(TRAIN)!r}, run_name="__main__")
except SystemExit:
    print("as before" if gc.get_threshold() == before else gc.get_threshold())
"""
    return python("-c", code, **TELLING)


def test_the_garbage_collector_is_as_before_when_a_run_has_imported_everything(ended):
    assert ended.stdout.splitlines()[0] == "meanwhile 77" and ended.stdout.splitlines()[-1] == "as before", ended.stderr


def test_threads_of_a_run_spin_for_half_a_millisecond(ended):
    assert spins(ended.stderr) == "10000"


@pytest.mark.slow
@pytest.mark.parametrize("typed, said", [({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")])
def test_unless_the_environment_says_otherwise(tmp_path, typed, said):
    words = ["model=toy", "mode=plan", f"hydra.run.dir={tmp_path}/run"]
    ended = python(TRAIN, *words, **TELLING | typed)
    assert ended.returncode == 0, ended.stderr
    assert spins(ended.stderr) == said
