"""A SLURM of one's own on this machine: it starts, runs jobs, listens to nobody else, and nothing is left of it."""

import os
import subprocess
import sys
from functools import partial

import psutil
import pytest
from interpreters import ROOT


def daemons(folder):
    """Every process that says it belongs to the cluster in ``folder``."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline()) + " ".join(process.environ().values())
        except psutil.Error:
            continue
        if str(folder) in words and process.pid != os.getpid():
            found.append(process)
    return found


# The fixture skips a test where there can be no cluster.
@pytest.mark.slurm
def test_a_cluster_runs_jobs_on_loopback_only_and_nothing_is_left_of_it(cluster, tmp_path):
    folder, command = tmp_path / "c", [sys.executable, "-m", "tests.launchers.local_cluster"]
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, timeout=60)
    try:
        started = run([*command, "start", folder])
        assert started.stdout == f"2 nodes are idle. Use them with:\nexport SLURM_CONF={folder}/slurm.conf\n", (
            started.stderr
        )
        env = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}
        assert sorted(run(["srun", "-N2", "-n2", "printenv", "SLURMD_NODENAME"], env=env).stdout.split()) == [
            "n1",
            "n2",
        ]
        connections = [
            c for process in daemons(folder) for c in process.net_connections("inet") if c.status == "LISTEN"
        ]
        assert len(connections) >= 3
        assert {c.laddr.ip for c in connections} == {"127.0.0.1"}
        run(["sbatch", "--output=/dev/null", "--wrap", "sleep 600"], env=env, check=True)
    finally:
        run([*command, "stop", folder])
    assert not [process for process in daemons(folder) if process.is_running()]
    assert not folder.exists()
