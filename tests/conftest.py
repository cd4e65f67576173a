"""Worker processes for tests that need several ranks, shared by the whole session."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # ``ranks``, here and in the processes it starts

# Threads that wait for each other's share of an operation sleep: on busy cores they would spin most of the time away.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What the ranks and the runs of the command line import, four seconds' work: once, in the process that forks them.
multiprocessing.set_forkserver_preload(
    ["pytest", "torch", "torch.distributed.pipelining", "hydra.main", "training.app", "training.run", "wandb"]
)


@pytest.fixture(scope="session")
def ranks():
    """Started at the first use; ``ranks.run(world, function, *args)``."""
    from ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()
