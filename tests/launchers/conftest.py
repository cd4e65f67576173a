"""Makes the project and the worker functions of these tests importable, also in processes they start; a SLURM."""

import os
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parents[1]), str(_HERE), str(_HERE.parent / "training")]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A real SLURM of two nodes on this machine, for the whole session; its commands find it by SLURM_CONF."""
    from launchers.local_cluster import LocalCluster, missing

    if lacking := missing():
        pytest.skip(f"no SLURM here: {lacking}")
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    with LocalCluster(folder, nodes=2) as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        yield started
