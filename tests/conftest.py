"""Worker processes for tests that need several ranks, shared by the whole session."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# Where the tests' helpers are found, here and in the processes that it starts.
ROOMS = ("", "training", "training/studies/verify", "parallel", "launchers", "cuda", "refusals", "peers")
sys.path[:0] = [str(HERE / room) for room in ROOMS]
import preloaded  # noqa: E402, F401

from launchers import local  # noqa: E402

# Under nohup a run would ignore a lost terminal, as it should, and so would those of the tests.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests are run in the background
# Threads that wait for each other's share of an operation sleep: on busy cores they would spin most of the time away.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# ``train.precision=auto`` is fp32 on every machine, with bf16 units or without. `CPU_PRECISION=bf16 pytest` runs the
# same tests with the other meaning.
os.environ.setdefault("CPU_PRECISION", "fp32")
# Triton decides at its import whether its kernels are interpreted, as tests without a GPU have them.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# One process forks the commands, the ranks and the workers of runs in this process.
local._PRELOAD = ("tests.preloaded",)
multiprocessing.set_forkserver_preload(["tests.preloaded"])


# Fixtures of a whole session that cost much, and the group of the tests that share what they made.
_SHARED = {"cli": "runs", "toy": "runs", "cluster": "cluster", "local_losses": "cluster", "gpus": "pretend_cuda"}
# The groups that take longest. pytest-xdist itself would begin with those of most tests, and keep one worker waiting at
# the end for the other one's minute in a group of one test.
_FIRST = ("README.md", "docs/verify.md", "gpt2", "runs", "test_verify", "test_checkpoints", "pretend_cuda")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items):
    """Has pytest-xdist keep together the tests of a file, and those that share runs; long ones come first."""
    order = {}
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        if mark is None:
            groups = [group for name, group in _SHARED.items() if name in item.fixturenames]
            cell = getattr(item, "callspec", None) and item.callspec.params.get("cell")  # of parity: one group a model
            mark = pytest.mark.xdist_group(groups[0] if groups else cell.recipe.model if cell else item.path.stem)
            item.add_marker(mark)
        (group,) = mark.args
        order[item] = group not in _FIRST, not item.nodeid.startswith("tests/training/")
    items.sort(key=order.get)


@pytest.fixture
def started():
    """``started(*words, **options)``: a new interpreter (``subprocess.Popen``), which ends with the test."""
    running = []

    def start(*words: str, **options) -> subprocess.Popen:
        options = {"cwd": HERE.parent, "stdout": subprocess.PIPE, "text": True, **options}
        running.append(subprocess.Popen([sys.executable, *words], **options))
        return running[-1]

    yield start
    for one in running:
        one.kill()
        if one.returncode is None:
            one.communicate()


@pytest.fixture(scope="session")
def ranks():
    """Started at the first use; ``ranks.run(world, function, *args)``."""
    from ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pretended():
    """Skips a test where no GPU can be pretended."""
    import pretend_cuda

    if problem := pretend_cuda.why_not():
        pytest.skip(f"pretend CUDA: {problem}")


@pytest.fixture(scope="session")
def environment(pretended):
    """Environment variables with which a process has two GPUs."""
    import pretend_cuda

    return pretend_cuda.environment(devices=2)


@pytest.fixture(scope="session")
def gpus(environment):
    """``gpus.run(world, function, *args)`` on ranks with two GPUs and a backend like NCCL."""
    from ranks import Ranks

    pool = Ranks(4, environment, "pretend_nccl")
    yield pool
    pool.close()
