"""A SLURM job step's environment in torchrun's names."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Mapping

_FIRST_PORT, _PORTS = 20000, 10000  # below the ports that systems hand out by themselves
_SCONTROL_S = 10.0


def step_environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    """``environ`` with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the job step that
    this process is a task of; unchanged where it is none, where the step has one task only (a shell in an allocation),
    and where RANK or WORLD_SIZE is set already.

    The port follows from the job's number; MASTER_ADDR and MASTER_PORT, where set, stay.
    """
    if not is_step(environ):
        return environ
    nodes = expand(environ["SLURM_STEP_NODELIST"])
    tasks = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    job = int(environ["SLURM_JOB_ID"])
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks[int(environ["SLURM_NODEID"])]),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or node_address(nodes[0]),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_FIRST_PORT + job % _PORTS),
    }
    return {**environ, **found}


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether ``environ`` is that of one task of several, and nothing else has said who the process is."""
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return False
    # A batch script has SLURM_PROCID too, but no step.
    return bool(environ.get("SLURM_STEP_ID")) and int(environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def expand(nodes: str) -> list[str]:
    """SLURM's short form in full: ``n[1-2,05]-x,m`` is n1-x, n2-x, n05-x, m."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        stems = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            stems = [stem + piece for stem in stems for piece in ([plain] if plain else _numbers(ranges))]
        names.extend(stems)
    return names


def _numbers(ranges: str) -> list[str]:
    found = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        found.extend(f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1))
    return found


def tasks_per_node(text: str) -> list[int]:
    """SLURM's short form in full: ``2(x3),1`` is 2, 2, 2, 1."""
    found = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found.extend([int(count)] * int(times or 1))
    return found


@functools.lru_cache
def node_address(node: str) -> str:
    """The address by which SLURM itself reaches ``node``: its name need not be one that the system can resolve."""
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", node], text=True, capture_output=True, timeout=_SCONTROL_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return node
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found.group(1) if found else node
