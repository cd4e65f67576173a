"""A SLURM job step's environment in torchrun's names."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Mapping

_FIRST_PORT, _PORTS = 20000, 10000  # below the ports that systems hand out by themselves
_SCONTROL_S = 10.0


def step_environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return ``environ`` with the variables of a task as torchrun would set them.

    They are RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The port follows from the
    job's number; MASTER_ADDR and MASTER_PORT stay where they are set. ``environ`` is returned unchanged where
    ``is_step`` is false.
    """
    if not is_step(environ):
        return environ
    tasks = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    job = int(environ["SLURM_JOB_ID"])
    return {
        **environ,
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks[int(environ["SLURM_NODEID"])]),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or node_address(first_node(environ["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_FIRST_PORT + job % _PORTS),
    }


def is_step(environ: Mapping[str, str]) -> bool:
    """Return whether ``environ`` is that of one task of several, and does not set RANK or WORLD_SIZE already."""
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return False
    # A batch script has SLURM_PROCID too, but no step.
    return bool(environ.get("SLURM_STEP_ID")) and int(environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def first_node(nodes: str) -> str:
    """Return the first name of SLURM's short form: ``n[05-7,9]-x,m`` begins with n05-x."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes).group()
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def tasks_per_node(text: str) -> list[int]:
    """Return SLURM's short form in full: ``2(x3),1`` is 2, 2, 2, 1."""
    pieces = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in pieces for _ in range(int(times or 1))]


@functools.lru_cache
def node_address(node: str) -> str:
    """Return the address by which SLURM itself reaches ``node``: its name need not be one that the system can resolve.

    It is the name itself where SLURM does not say.
    """
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", node], text=True, capture_output=True, timeout=_SCONTROL_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return node
    address = re.search(r"\bNodeAddr=(\S+)", shown)
    return address.group(1) if address else node
