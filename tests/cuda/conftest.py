"""Ranks whose GPUs are pretended (see ``pretend_cuda``), for the cases of ``tests/parallel``."""

from __future__ import annotations

import sys
from pathlib import Path

import pretend_cuda
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # ``gpu_cases``, here and on the ranks
for other in ("parallel", "training"):  # ``cases``, ``comparing``, ``commandline``, ``composed``
    sys.path.insert(1, str(Path(__file__).resolve().parents[1] / other))


@pytest.fixture(scope="session")
def pretended():
    """Skips a test where no GPU can be pretended."""
    if problem := pretend_cuda.why_not():
        pytest.skip(f"pretend CUDA: {problem}")


@pytest.fixture(scope="session")
def environment(pretended):
    """Environment variables with which a process has two GPUs."""
    return pretend_cuda.environment(devices=2)


@pytest.fixture(scope="session")
def gpus(environment):
    """``gpus.run(world, function, *args)`` on ranks with two GPUs and a backend like NCCL."""
    from ranks import Ranks

    pool = Ranks(4, environment, "pretend_nccl")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def trained(gpus):
    """``trained(layout, recipe)``: a list of what each rank saw (``cases.Result``); each layout runs once."""
    from cases import trainings

    return trainings(gpus)
