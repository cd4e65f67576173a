"""Ranks whose GPUs are pretended (see ``pretend_cuda``), for the cases of ``tests/parallel``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # ``gpu_cases``, here and on the ranks
for other in ("parallel", "training"):  # ``cases``, ``cells``, ``comparing``, ``commandline``, ``composed``
    sys.path.insert(1, str(Path(__file__).resolve().parents[1] / other))


@pytest.fixture(scope="session")
def trained(gpus):
    """``trained(layout, recipe)``: a list of what each rank saw (``cases.Result``); each layout runs once."""
    from cases import trainings

    return trainings(gpus)
