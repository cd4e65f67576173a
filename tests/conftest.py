"""Worker processes for tests that need several ranks, shared by the whole session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # ``ranks``, here and in the processes it starts


@pytest.fixture(scope="session")
def ranks():
    """Started at the first use; ``ranks.run(world, function, *args)``."""
    from ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()
