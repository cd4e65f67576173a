"""Whether the machines of a run can reach each other, asked before it starts and when it has failed."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import LaunchError
from launchers.loopback import LOOPBACK, is_loopback, listen
from launchers.watch import Watch, say_farewell
from launchers.world import World, master_address

if TYPE_CHECKING:
    from torch.distributed import Store

_PROBE_S = 5.0
_POLL_S = 0.05
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Place:
    """Where a rank is: its machine's name, the address and port at which it can be asked whether it is there."""

    rank: int
    leader: bool  # the first rank of its machine
    node: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.node}, {self.address})"


class PeerCheck:
    """The places of all ranks of ``world``, which must all construct one. ``places`` is by rank.

    Where several machines take part, one rank of each tries to reach one of each other, through the interface that
    gloo and NCCL will use: the one that GLOO_SOCKET_IFNAME names, else the one that leads to MASTER_ADDR (then both
    variables are set to it).

    Raises LaunchError, on every rank and within ``timeout_s``, naming the pairs that cannot connect.
    """

    def __init__(self, world: World, store: Store, timeout_s: float) -> None:
        self._world, self._store = world, store
        self._deadline = time.monotonic() + timeout_s
        self._watches: list[Watch] = []
        self._listener = listen(_own_address(), 0)
        address, port = self._listener.getsockname()[:2]
        mine = [world.rank, world.local_rank == 0, node_name(), address, port]
        found = self._exchange("place", [mine, timeout_s])
        self.places = [Place(*place) for place, _ in found]
        self._patience_s = found[0][1]
        leaders = [place for place in self.places if place.leader]
        if len(leaders) > 1:
            me = self.places[world.rank]
            others = [place for place in leaders if place.rank != world.rank] if me.leader else []
            patience = min(_PROBE_S, timeout_s / 2)
            failed = [f"{me} cannot connect to {other}: {why}" for other, why in _probe(others, patience)]
            if failures := [line for lines in self._exchange("failures", failed) for line in lines]:
                raise LaunchError("\n".join([*failures, _advice()]))

    def watch(self, give_up: Callable[[LaunchError], None]) -> None:
        """From now on ``give_up`` is called, in a thread, when the rank after this one dies without a word, or when the
        next machine has not answered for two thirds of rank 0's ``timeout_s`` (only rank 0 need know it).

        A rank that only waits would learn of neither before its own time is up. Raises LaunchError where this rank
        cannot connect to one of the two.
        """
        me = self.places[self._world.rank]
        for place in self._next():

            def died(place: Place = place) -> None:
                error = LaunchError(f"{place} has ended before its work was done, without a word")
                error.__cause__ = ConnectionResetError()  # what launchers.failure takes for a consequence
                give_up(error)

            def lost(why: str, place: Place = place) -> None:
                there = [other for other in self.places if _machine(other) == _machine(place)]
                give_up(LaunchError(_lost(me, there, why)))

            try:
                self._watches.append(Watch((place.address, place.port), self._patience_s, died, lost))
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                raise LaunchError(f"{me} cannot connect to {place}: {why}\n{_advice()}") from error

    def _next(self) -> list[Place]:
        """The rank after this one, and the first rank of the machine after this one, both in a ring."""
        me = self.places[self._world.rank]
        leaders = [place for place in self.places if place.leader]
        mine = next(n for n, leader in enumerate(leaders) if _machine(leader) == _machine(me))
        chosen = self.places[(me.rank + 1) % len(self.places)], leaders[(mine + 1) % len(leaders)]
        return [place for n, place in enumerate(chosen) if place != me and place not in chosen[:n]]

    def lost(self) -> str | None:
        """Which ranks cannot be reached any more, in words; None where all can, or have merely ended."""
        me = self.places[self._world.rank]
        others = [place for place in self.places if place.address != me.address]
        gone = [(place, why) for place, why in _probe(others, _PROBE_S) if "refused" not in why]
        if not gone:
            return None
        return _lost(me, [place for place, _ in gone], gone[0][1])

    def running(self, ranks: list[int]) -> list[Place]:
        """Those of ``ranks`` whose processes are there, be they stopped: their ports are still open."""
        places = [self.places[rank] for rank in ranks if rank != self._world.rank]
        gone = [place for place, _ in _probe(places, _PROBE_S)]
        return [place for place in places if place not in gone]

    def close(self, finished: bool = True) -> None:
        """finished: this rank's work is done; otherwise those that watch it take it for dead."""
        for watch in self._watches:
            watch.close()
        if finished:
            say_farewell(self._listener)
        self._listener.close()

    def __enter__(self) -> PeerCheck:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest) -> None:
        # Others than Exception are wishes to stop, which all ranks heed together.
        self.close(finished=kind is None or not issubclass(kind, Exception))

    def _exchange(self, what: str, mine) -> list:
        """What each rank gave, by rank."""
        size = self._world.size
        self._store.set(f"{what}-{self._world.rank}", json.dumps(mine))
        keys = [f"{what}-{rank}" for rank in range(size)]
        while missing := [rank for rank in range(size) if not self._store.check([keys[rank]])]:
            if time.monotonic() > self._deadline:
                raise LaunchError(
                    f"rank {self._world.rank} heard nothing from rank {', '.join(map(str, missing))} any more: has it "
                    "ended, or lost its connection to rank 0?"
                )
            time.sleep(_POLL_S)
        return [json.loads(self._store.get(key)) for key in keys]


def describe_places(places: list[Place]) -> str:
    """Which ranks are on which machine: "n1: ranks 0-1   n2: ranks 2-3"."""
    nodes: dict[tuple[str, str], list[int]] = {}
    for place in places:
        nodes.setdefault((place.node, place.address if _several_addresses(places, place.node) else ""), []).append(
            place.rank
        )
    return "   ".join(f"{' '.join(filter(None, node))}: {_ranks(ranks)}" for node, ranks in nodes.items())


def node_name() -> str:
    """This machine's name, as SLURM knows it where this is one of its nodes."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _machine(place: Place) -> tuple[str, str]:
    return place.node, place.address


def _lost(me: Place, there: list[Place], why: str) -> str:
    names = ", ".join(map(str, there))
    return f"{me} lost the connection to {names}: {why}. The network between them, or that machine, is down"


def _several_addresses(places: list[Place], node: str) -> bool:
    return len({place.address for place in places if place.node == node}) > 1


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    run = ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]}-{ranks[-1]}" if run else f"ranks {','.join(map(str, ranks))}"


def _probe(places: list[Place], timeout_s: float) -> list[tuple[Place, str]]:
    """Those of ``places`` that do not answer within ``timeout_s``, with the reason."""

    def ask(place: Place) -> str | None:
        try:
            with socket.create_connection((place.address, place.port), timeout=timeout_s):
                return None
        except TimeoutError:
            return f"no answer within {timeout_s:g} s"
        except OSError as error:
            return (error.strerror or str(error)).lower()

    if not places:
        return []
    with ThreadPoolExecutor(min(64, len(places))) as pool:
        answers = list(pool.map(ask, places))
    return [(place, why) for place, why in zip(places, answers, strict=True) if why is not None]


def _own_address() -> str:
    """The address of the interface that gloo will use, which this settles where the user has not."""
    host, port = master_address()
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        addresses = _addresses()
        if named not in addresses:
            raise LaunchError(
                f"GLOO_SOCKET_IFNAME={named} is no interface of this machine with an IPv4 address; there are "
                f"{', '.join(f'{name} ({address})' for name, address in addresses.items())}"
            )
        return addresses[named]
    if is_loopback(host):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing: asks the routing table
        except OSError as error:
            raise LaunchError(f"this machine has no way to MASTER_ADDR={host}: {error}") from error
        address = probe.getsockname()[0]
    for name, its_address in _addresses().items():
        if its_address == address:
            for variable in _INTERFACES:
                os.environ.setdefault(variable, name)
    return address


def _addresses() -> dict[str, str]:
    """Interface -> its first IPv4 address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _advice() -> str:
    addresses = ", ".join(f"{name} ({address})" for name, address in _addresses().items())
    return (
        "Open the way between these machines (firewall, routes), or name the interface of the network that joins them: "
        f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; here there are {addresses}"
    )
