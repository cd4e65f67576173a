"""Ranks on several machines: where each of them is, and whether they can reach each other, before the run begins."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import LaunchError
from launchers.heartbeat import watched
from launchers.meeting import connect, listen
from launchers.world import LOOPBACK, World, has_local_rank, is_loopback, master_address

if TYPE_CHECKING:
    from torch.distributed import Store

_PROBE_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        rank: The rank.
        leader: Whether it is the first rank of its machine.
        node: The machine's name.
        address: The machine's IPv4 address.
        port: The port on which the rank listens for the others' probes.
        timeout_s: How long it waits for others, in seconds, as far as it knows the configuration.
    """

    rank: int
    leader: bool
    node: str
    address: str
    port: int
    timeout_s: float

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.node}, {self.address})"

    @property
    def machine(self) -> tuple[str, str]:
        """Equal for ranks on the same machine."""
        return self.node, self.address


@contextmanager
def rendezvous(world: World, timeout_s: float) -> Iterator[tuple[Store | None, list[Place]]]:
    """Meet the other ranks; while the block runs, let them know what this rank is doing.

    Args:
        world: This rank's world.
        timeout_s: How long to wait for the others, in seconds.

    Yields:
        The store that all ranks share, None for a single rank; and the places of the ranks, by rank, which are empty
        where ``run_workers`` has started them.

    Raises:
        LaunchError: Ranks do not come or machines cannot reach each other; or the block has failed because others were
            lost and some stand still. The message names the ranks.
    """
    store = connect(world, timeout_s)
    if store is None:
        yield None, []
        return
    places: list[Place] = []
    names, neighbours = [f"rank {rank}" for rank in range(world.size)], set(range(world.size))
    if world.origin != "local":
        places = find_peers(world, store, timeout_s)
        timeout_s = places[0].timeout_s  # rank 0 knows the configuration
        names = list(map(str, places))
        neighbours = {place.rank for place in places if place.machine == places[world.rank].machine}
    with watched(world, store, timeout_s, names, neighbours):
        yield store, places


def find_peers(world: World, store: Store, timeout_s: float) -> list[Place]:
    """Return the place of each rank, by rank. All ranks must call it.

    One rank of each machine tries to reach one of each other machine, through the interface that gloo and NCCL will
    use: the one that GLOO_SOCKET_IFNAME names, else the one that leads to MASTER_ADDR (both variables are then set).

    Raises:
        LaunchError: On every rank and within ``timeout_s``, naming the pairs that cannot connect.
    """
    deadline = time.monotonic() + timeout_s
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    with listen(own_address(), 0) as listener:
        address, port = listener.getsockname()[:2]
        mine = [world.rank, world.local_rank == 0, node, address, port, timeout_s]
        places = [Place(*place) for place in _exchange(world, store, "place", mine, deadline)]
        me = places[world.rank]
        if world.origin == "environment" and world.local_size == 1 and not has_local_rank():
            _check_one_rank_per_machine(places)
        leaders = [place for place in places if place.leader]
        others = [place for place in leaders if place != me] if me.leader else []
        failed = [f"{me} cannot connect to {place}: {why}" for place, why in _probe(others, timeout_s).items() if why]
        failures = _exchange(world, store, "failures", failed, deadline)
    if lines := [line for lines in failures for line in lines]:
        raise LaunchError("\n".join([*lines, _advice()]))
    return places


def _exchange(world: World, store: Store, what: str, mine: Any, deadline: float) -> list:
    """Gather what each rank gives, by rank."""
    keys = [f"{what}-{rank}" for rank in range(world.size)]
    store.set(keys[world.rank], json.dumps(mine))
    while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"rank {world.rank} heard nothing from rank {', '.join(map(str, missing))} any more: has it "
                "ended, or lost its connection to rank 0?"
            )
        time.sleep(_POLL_S)
    return [json.loads(store.get(key)) for key in keys]


def _probe(places: list[Place], timeout_s: float) -> dict[Place, str]:
    """Connect to each of ``places``; return why it does not work, in words, which are empty where it does."""
    limit_s = min(_PROBE_S, timeout_s / 2)

    def ask(place: Place) -> str:
        try:
            with socket.create_connection((place.address, place.port), timeout=limit_s):
                return ""
        except TimeoutError:
            return f"no answer within {limit_s:g} s"
        except OSError as error:
            return (error.strerror or str(error)).lower()

    with ThreadPoolExecutor(max(1, min(64, len(places)))) as pool:
        return dict(zip(places, pool.map(ask, places), strict=True))


def _check_one_rank_per_machine(places: list[Place]) -> None:
    """Raise LaunchError where ranks that were given no LOCAL_RANK share a machine: they would share its first GPU."""
    machines = Counter(place.machine for place in places)
    machine, count = machines.most_common(1)[0]
    if count > 1:
        ranks = ", ".join(str(place.rank) for place in places if place.machine == machine)
        raise LaunchError(
            f"ranks {ranks} are all on {' '.join(machine)} and LOCAL_RANK is not set, which stands for one rank per "
            "machine: set LOCAL_RANK and LOCAL_WORLD_SIZE for each rank, or start them with torchrun"
        )


def describe_places(places: list[Place]) -> str:
    """Describe which ranks are on which machine: "n1: ranks 0-1   n2: ranks 2-3"."""
    machines: dict[tuple[str, str], list[int]] = {}
    for place in places:
        machines.setdefault(place.machine, []).append(place.rank)
    names = [node for node, _ in machines]
    words = []
    for (node, address), ranks in machines.items():
        name = node if names.count(node) == 1 else f"{node} {address}"
        in_order = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
        numbers = f"{ranks[0]}-{ranks[-1]}" if in_order else ",".join(map(str, ranks))
        words.append(f"{name}: rank{'s' * (len(ranks) > 1)} {numbers}")
    return "   ".join(words)


def own_address() -> str:
    """Return the IPv4 address of the interface that gloo and NCCL will use.

    It is the interface that GLOO_SOCKET_IFNAME names, else the one that leads to MASTER_ADDR; the variables that name
    it are then set where the user has not.

    Raises:
        LaunchError: There is no such interface, or none that leads to MASTER_ADDR.
    """
    host, port = master_address()
    addresses = _addresses()
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        first = named.split(",")[0]  # gloo takes several; ranks are known by their address on the first
        if first not in addresses:
            raise LaunchError(
                f"GLOO_SOCKET_IFNAME={named}: {first} is no interface of this machine with an IPv4 address; there are "
                f"{_listed(addresses)}"
            )
        return addresses[first]
    if is_loopback(host):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing: asks the routing table
        except OSError as error:
            raise LaunchError(f"this machine has no way to MASTER_ADDR={host}: {error}") from error
        address = probe.getsockname()[0]
    for name in (name for name, its_address in addresses.items() if its_address == address):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)
    return address


def _addresses() -> dict[str, str]:
    """Return each interface's first IPv4 address."""
    import psutil

    first: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                first.setdefault(name, address.address)
    return first


def _listed(addresses: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in addresses.items())


def _advice() -> str:
    """Say what a user can do where machines cannot reach each other."""
    return (
        "Open the way between these machines (firewall, routes), or name the interface of the network that joins them: "
        f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; here there are {_listed(_addresses())}"
    )
