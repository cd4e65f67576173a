"""A real SLURM for tests, of which nothing is left however they end."""

import os
import shlex
import subprocess
import sys
from contextlib import contextmanager

import pytest
from afterwards import afterwards
from local_cluster import LocalCluster, missing

from common.errors import LaunchError


@contextmanager
def started(folder, nodes=2):
    """A LocalCluster that has run a job; skips the test, with the reason, where there can be none."""
    if lacking := missing():
        pytest.skip(f"no SLURM here: {lacking}")
    with afterwards(shlex.join([sys.executable, "-m", "tests.launchers.local_cluster", "stop", str(folder)])):
        cluster = LocalCluster(folder, nodes)
        try:
            cluster.start()
            env = {**os.environ, **cluster.environment}
            command = ["srun", f"--nodes={nodes}", "true"]
            subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60)
        except (LaunchError, subprocess.SubprocessError) as error:
            words = f"{error} {getattr(error, 'stderr', None) or ''}".strip()
            pytest.skip(f"SLURM is installed here and does not run a job: {words.replace(str(folder), 'FOLDER')}")
        yield cluster
