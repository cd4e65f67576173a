"""``train.py launcher=slurm`` as a user types it, and what tests do to the job meanwhile."""

import os
import subprocess
from pathlib import Path

from commandline import Started, environment

TWO_NODES = ["launcher=slurm", "launcher.nodes=2", "launcher.poll_s=0.5", "launcher.mem_gb=1", "launcher.time_min=10"]
TOY = ["device=cpu", "train.epochs=null", "train.eval_every=null"]
FAULTS = Path(__file__).resolve().parent / "faults"


class Job(Started):
    """The command, with the job that it has queued on ``cluster``."""

    def __init__(self, cluster, overrides, folder, **options):
        self._cluster = cluster
        paths = os.pathsep.join(filter(None, [str(FAULTS), os.environ.get("PYTHONPATH")]))
        super().__init__(overrides, folder, env={**cluster.environment, "PYTHONPATH": paths}, **options)

    @property
    def number(self):
        """The job's, None before it runs."""
        output = next((self.folder / "slurm").glob("*.out"), None)
        return output and output.stem

    def steps(self):
        """How many lines of metrics there are."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def rank(self, rank):
        """The process of a rank of the job, found by its environment; None where there is none."""
        wanted = {
            "SLURM_CONF": self._cluster.environment["SLURM_CONF"],
            "SLURM_JOB_ID": self.number,
            "SLURM_PROCID": str(rank),
        }
        wanted = {f"{name}={value}".encode() for name, value in wanted.items()}
        for entry in Path("/proc").iterdir():
            try:
                inside = b"training.command.slurm_job" in (entry / "cmdline").read_bytes()
                words = set((entry / "environ").read_bytes().split(b"\0")) if inside else set()
            except OSError:
                continue
            if wanted <= words and any(word.startswith(b"SLURM_STEP_ID=") for word in words):
                return int(entry.name)
        return None

    def tell_slurm(self, *command):
        ask(self._cluster, *command, self.number)


def ask(cluster, *command):
    """What one of SLURM's commands says."""
    env = environment(cluster.environment)
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=True).stdout


def queue(cluster):
    """What is in the queue; empty when nothing is."""
    return ask(cluster, "squeue", "--noheader", "--array")
