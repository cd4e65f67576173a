"""The rank of this process and the number of ranks, from the environment."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import LaunchError

# ROLE_NAME of the workers that run_workers starts; torchrun has the same variable.
LOCAL_ROLE = "launchers.local"
# The variable that names the file in which these workers meet. No other user can enter its folder.
STORE_FILE = "LAUNCHERS_STORE_FILE"
LOOPBACK = "127.0.0.1"
_CLOCK_S = 600
_FIRST_PORT, _PORTS = 20000, 10000  # below the ports that systems assign by themselves
_STEP = 1009  # distance of the ports of two steps of one job: the next job has the next port
_SCONTROL_S = 10.0


@dataclass(frozen=True)
class World:
    """This process's rank in the run.

    Attributes:
        rank: Its number over all machines.
        size: The number of ranks over all machines.
        local_rank: Its number on this machine.
        local_size: The number of ranks on this machine.
        origin: "alone" (no others), "local" (started by run_workers), "torchrun", "slurm" (a task of a job step), or
            "environment" (set by hand).
        meeting: The ranks that it has met (``launchers.heartbeat.Meeting``); None before that, and for a single rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    origin: str
    meeting: Any = field(default=None, compare=False, repr=False)

    @property
    def nodes(self) -> int:
        """The number of machines of the ranks that it has met; 1 if it has met none, or if they have met in a file."""
        return sum(peer.leader for peer in self.meeting.peers) or 1 if self.meeting else 1

    @classmethod
    def alone(cls) -> World:
        """Return the world of a single process."""
        return cls(0, 1, 0, 1, "alone")

    @staticmethod
    def is_described(environ: Mapping[str, str] = os.environ) -> bool:
        """Return whether the environment describes ranks, right or wrong."""
        names = ("RANK", "WORLD_SIZE", *(names["WORLD_SIZE"] for names in _MPI_NAMES))
        return _is_step(environ) or any(environ.get(name) for name in names)

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> World | None:
        """Return the world that RANK and WORLD_SIZE, a SLURM step of several tasks, or mpirun describe.

        The names are torchrun's. MASTER_ADDR and MASTER_PORT must be set if there are several ranks that run_workers
        has not started. LOCAL_RANK and LOCAL_WORLD_SIZE may be left out together. If MASTER_ADDR is a loopback address,
        all ranks are then on this machine; otherwise each has a machine to itself, such as a pod of Kubernetes.

        Args:
            environ: The environment variables.

        Returns:
            The world; None if the environment describes none.

        Raises:
            LaunchError: If a variable is missing or contradicts the others. The message names it.
        """
        origin = _origin(environ)
        environ = step_environment(environ)
        if not environ.get("RANK") and not environ.get("WORLD_SIZE"):
            return None
        rank, size = (_integer(environ, name) for name in ("RANK", "WORLD_SIZE"))
        _check_rank("RANK", rank, "WORLD_SIZE", size)
        if size > 1 and origin != "local":
            master_address(environ)
        if size == 1 or is_loopback(environ.get("MASTER_ADDR", "")):
            environ = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), **environ}
        elif not environ.get("LOCAL_RANK") and not environ.get("LOCAL_WORLD_SIZE"):
            environ = {**environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        local_rank, local_size = (_integer(environ, name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        _check_rank("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
        if local_size > size:
            raise LaunchError(f"LOCAL_WORLD_SIZE={local_size} is more than WORLD_SIZE={size}, the whole run")
        return cls(rank, size, local_rank, local_size, origin)


@dataclass(frozen=True)
class Peer:
    """The machine and address of a rank.

    Attributes:
        rank: The rank.
        leader: Whether it is the first rank of its machine.
        node: The machine's name.
        address: The machine's address.
        port: The port on which the rank listens for the others' probes.
    """

    rank: int
    leader: bool
    node: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.node}, {self.address})"

    @property
    def machine(self) -> tuple[str, str]:
        """Equal for ranks on the same machine."""
        return self.node, self.address


def master_address(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return host and port at which the ranks meet, from MASTER_ADDR and MASTER_PORT.

    Raises:
        LaunchError: If one of them is missing or is not valid.
    """
    environ = step_environment(environ)
    host = environ.get("MASTER_ADDR")
    if not host:
        raise LaunchError(
            "MASTER_ADDR is not set, but WORLD_SIZE says there are other ranks to meet: set it to rank 0's "
            "address (127.0.0.1 when all ranks are on this machine) and MASTER_PORT to a free port there; mpirun "
            "passes them on with -x MASTER_ADDR -x MASTER_PORT (Open MPI), -genv MASTER_ADDR ... (MPICH, Intel MPI)"
        )
    port = _integer(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise LaunchError(f"MASTER_PORT={port} is not a port: choose a free one from 1 to 65535 on {host}")
    return host, port


def restarts(environ: Mapping[str, str] = os.environ) -> int:
    """Return how often run_workers or torchrun has started the ranks before, or a queue their job."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT") or environ.get("SLURM_RESTART_COUNT") or 0)


def launcher_start(environ: Mapping[str, str] = os.environ) -> tuple[float, str] | None:
    """Return the start time of torchrun, in seconds since the epoch, and six digits that name it.

    Both are the same at each restart. The time is rounded down to ten minutes, because the start time of a process
    drifts with the clock of the system. None if torchrun has not started this process.
    """
    if _origin(environ) != "torchrun":
        return None
    import psutil

    agents = (p for p in psutil.Process().parents() if "TORCHELASTIC_RUN_ID" not in p.environ())
    agent = next(agents)  # between it and this process may be a script (torchrun --no-python)
    began = agent.create_time() // _CLOCK_S * _CLOCK_S
    return began, hashlib.sha256(f"{socket.gethostname()} {agent.pid} {began}".encode()).hexdigest()[:6]


def _integer(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name)
    if not value:
        have = ", ".join(f"{n}={environ[n]}" for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if environ.get(n))
        raise LaunchError(f"{name} is not set, though {have} is: set it too, or unset all to start the ranks here")
    try:
        return int(value)
    except ValueError:
        raise LaunchError(f"{name}={value!r} is not an integer") from None


def _check_rank(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1:
        raise LaunchError(f"{size_name}={size}: a run has at least 1 process")
    if not 0 <= rank < size:
        last = size - 1
        raise LaunchError(f"{rank_name}={rank} does not fit {size_name}={size}: ranks go from 0 to {last}")


def _origin(environ: Mapping[str, str]) -> str:
    if _is_step(environ):
        return "slurm"
    if environ.get("ROLE_NAME") == LOCAL_ROLE:
        return "local"
    return "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "environment"


def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address, without asking a name server."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


# -- a SLURM job step's environment, and that of mpirun, in torchrun's names -----------------------------------------

# The variables of Open MPI, and of MPICH and its derivatives.
_MPI_NAMES = (
    {
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE", "RANK": "OMPI_COMM_WORLD_RANK",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    {
        "WORLD_SIZE": "PMI_SIZE", "RANK": "PMI_RANK",
        "LOCAL_RANK": "MPI_LOCALRANKID", "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
    },
)  # fmt: skip


def step_environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return ``environ`` with the variables of a task as torchrun would set them.

    They are RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The port follows from the
    numbers of job and step, unless MASTER_PORT is set. If mpirun has started several processes, only the first four are
    set. Otherwise ``environ`` is returned unchanged.
    """
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return environ
    if not _is_step(environ):
        for names in _MPI_NAMES:
            if int(environ.get(names["WORLD_SIZE"]) or 1) > 1:
                return {**environ, **{name: environ[its] for name, its in names.items() if its in environ}}
        return environ
    tasks = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    step = int(environ["SLURM_JOB_ID"]) + _STEP * int(environ["SLURM_STEP_ID"])
    return {
        **environ,
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks[int(environ["SLURM_NODEID"])]),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or node_address(first_node(environ["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_FIRST_PORT + step % _PORTS),
    }


def _is_step(environ: Mapping[str, str]) -> bool:
    """Return whether ``environ`` is that of one of several tasks, and RANK and WORLD_SIZE are not set already."""
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return False
    # A batch script has SLURM_PROCID too, but no step.
    if not environ.get("SLURM_STEP_ID") or int(environ.get("SLURM_STEP_NUM_TASKS") or 1) < 2:
        return False
    # mpirun's daemons are the tasks of such a step, too.
    return not any(names["LOCAL_RANK"] in environ for names in _MPI_NAMES)


def first_node(nodes: str) -> str:
    """Return the first name of SLURM's short form: ``n[05-7,9]-x,m`` begins with n05-x."""
    first = re.findall(r"(?:[^,\[]|\[[^\]]*\])*", nodes)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def tasks_per_node(text: str) -> list[int]:
    """Return SLURM's short form in full: ``2(x3),1`` is 2, 2, 2, 1."""
    pieces = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in pieces for _ in range(int(times or 1))]


@functools.lru_cache
def node_address(node: str) -> str:
    """Return the address by which SLURM reaches ``node``: the system may not resolve its name.

    If SLURM does not know an address, this is the name itself.
    """
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", node], text=True, capture_output=True, timeout=_SCONTROL_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return node
    address = re.search(r"\bNodeAddr=(\S+)", shown)
    return address.group(1) if address else node
