"""Ranks on several machines: whether they can reach each other before the run, and whether all are alive during it.

Each rank listens on a port of its own and keeps it open until it ends or fails. That port alone tells the others how
the rank is: it accepts connections (the rank runs, or is stopped), it refuses them (the rank has ended or has failed),
or it does not answer (the network or the machine is down).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import LaunchError
from launchers import heartbeat
from launchers.failure import is_peer_error, log_path
from launchers.meeting import connect, listen
from launchers.world import LOOPBACK, World, has_local_rank, is_loopback, master_address

if TYPE_CHECKING:
    from torch.distributed import Store

_PROBE_S = 5.0
_POLL_S = 0.05
_KEEPALIVES = 3
# After a rank has died: by then srun, an agent or a failed collective has ended this process too, if they noticed.
_GRACE_S = 10.0
# After the first rank has given up waiting: those that wait for it in turn fail at once.
_GIVE_UP_S = 4.0
# A rank that is stuck shows its stack so long after the others have given up: they do not show theirs.
_SHOW_S = 2.0
_STACK_FRAMES = 12
_FAREWELL = b"."
_REFUSED = "connection refused"


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        rank: The rank.
        leader: Whether it is the first rank of its machine.
        node: The machine's name.
        address: The machine's IPv4 address.
        port: The port on which the rank listens.
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


@contextmanager
def rendezvous(
    world: World, timeout_s: float, give_up: Callable[[LaunchError], None]
) -> Iterator[tuple[Store | None, list[Place]]]:
    """Meet the other ranks, and watch them while the block runs.

    Args:
        world: This rank's world.
        timeout_s: How long to wait for the others, in seconds.
        give_up: Called in a thread with the error when a rank or a machine is lost while this rank waits and cannot
            raise. It must end the process.

    Yields:
        The store that all ranks share and the places of the ranks, by rank; (None, []) for a single rank.

    Raises:
        LaunchError: Ranks do not come or machines cannot reach each other; or the block has failed because a
            connection was lost or a rank stands still. The message names the ranks.
    """
    store = connect(world, timeout_s)
    if store is None:
        yield None, []
        return
    peers, finished = PeerCheck(world, store, timeout_s), True
    try:
        peers.watch(give_up)
        yield store, peers.places
    except Exception as error:  # not a request to stop, which all ranks follow together
        finished = False
        if is_peer_error(error) and (reason := peers.explain()):
            raise LaunchError(reason) from error
        raise
    finally:
        peers.close(finished)


class PeerCheck:
    """The places of all ranks, and the connections between them. All ranks must construct one.

    One rank of each machine tries to reach one of each other machine, through the interface that gloo and NCCL will
    use: the one that GLOO_SOCKET_IFNAME names, else the one that leads to MASTER_ADDR (both variables are then set).

    Args:
        world: This rank's world.
        store: The store that all ranks share.
        timeout_s: How long to wait for the others, in seconds.

    Attributes:
        places: The place of each rank, by rank.

    Raises:
        LaunchError: On every rank and within ``timeout_s``, naming the pairs that cannot connect.
    """

    def __init__(self, world: World, store: Store, timeout_s: float) -> None:
        self._world, self._store, self._closed = world, store, False
        self._deadline = time.monotonic() + timeout_s
        self._watched: list[socket.socket] = []
        self._listener = listen(own_address(), 0)
        address, port = self._listener.getsockname()[:2]
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        answers = self._exchange("place", [[world.rank, world.local_rank == 0, node, address, port], timeout_s])
        self.places = [Place(*place) for place, _ in answers]
        self._me = self.places[world.rank]
        if world.origin == "environment" and world.local_size == 1 and not has_local_rank():
            _check_one_rank_per_machine(self.places)
        self._patience_s = answers[0][1]  # rank 0 knows the configuration
        leaders = [place for place in self.places if place.leader]
        if len(leaders) > 1:
            others = [place for place in leaders if place != self._me] if self._me.leader else []
            failed = [
                f"{self._me} cannot connect to {place}: {why}"
                for place, why in _probe(others, min(_PROBE_S, timeout_s / 2)).items()
                if why is not None
            ]
            if failures := [line for lines in self._exchange("failures", failed) for line in lines]:
                raise LaunchError("\n".join([*failures, _advice()]))

    def watch(self, give_up: Callable[[LaunchError], None]) -> None:
        """Watch the rank after this one and the first rank of the next machine, both in a ring.

        The connections are idle. The kernels of both machines ask over them whether the other end is alive, however
        busy the processes are. A rank that only waits would otherwise learn nothing before its own time is up.

        Args:
            give_up: Called in a thread when a watched rank has died without a word, or when its machine has not
                answered for two thirds of rank 0's ``timeout_s``.

        Raises:
            LaunchError: This rank cannot connect to one of the two.
        """
        leaders = [place for place in self.places if place.leader]
        machine = next(n for n, leader in enumerate(leaders) if leader.machine == self._me.machine)
        ring = {self.places[(self._me.rank + 1) % len(self.places)], leaders[(machine + 1) % len(leaders)]}
        threading.Thread(target=self._show_stall, name="stack-of-a-stall", daemon=True).start()
        for place in ring - {self._me}:
            try:
                connection = socket.create_connection((place.address, place.port), timeout=self._patience_s)
            except OSError as error:
                raise LaunchError(f"{self._me} cannot connect to {place}: {_words(error)}\n{_advice()}") from error
            connection.settimeout(None)
            _keep_alive(connection, self._patience_s)
            self._watched.append(connection)
            threading.Thread(target=self._wait_for_end, args=(connection, place, give_up), daemon=True).start()

    def explain(self) -> str | None:
        """Find out why this rank has lost a peer, within some seconds. From now on this rank counts as failed.

        Returns:
            The ranks that cannot be reached any more, or those that still run and have not failed although the others
            have given up waiting for them, in words; None where there are neither.
        """
        self._listener.close()
        waiting = [place for place in self.places if place != self._me]
        deadline, pause = time.monotonic() + _GIVE_UP_S, _POLL_S
        while waiting:
            answers = _probe(waiting, _PROBE_S)
            if lost := {place: why for place, why in answers.items() if why not in (None, _REFUSED)}:
                return self._lost(list(lost), next(iter(lost.values())))
            waiting = [place for place, why in answers.items() if why is None]
            if time.monotonic() > deadline:
                break
            # Connections wait in the other's queue for ever, so few are made.
            time.sleep(pause := 2 * pause)
        if not waiting:
            return None
        step = heartbeat.here().step
        since = f"since step {step}" if step else "before step 1"
        logs = ", ".join(str(log_path("logs", place.rank)) for place in waiting if place.rank > 0) or "on the console"
        return (
            f"{', '.join(map(str, waiting))} has not moved {since}, and the other ranks have given up waiting "
            f"(parallel.timeout_s): it is stopped, or stuck; what it prints ({logs}) shows where"
        )

    def close(self, finished: bool = True) -> None:
        """Stop watching and listening.

        Args:
            finished: Whether this rank's work is done. Otherwise those that watch it take it for dead.
        """
        self._closed = True
        for connection in self._watched:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if finished:
            with suppress(OSError):  # nobody else is waiting
                self._listener.setblocking(False)
                while True:
                    connection, _ = self._listener.accept()
                    with suppress(OSError), connection:
                        connection.send(_FAREWELL)
        self._listener.close()

    def _show_stall(self) -> None:
        """Print where the main thread stands, if it has not moved for longer than the others wait for it."""
        patience_s = left_s = self._patience_s + _SHOW_S
        while left_s > 0:
            time.sleep(left_s)
            left_s = patience_s - heartbeat.here().silent_s
        if self._listener.fileno() >= 0:  # else this rank has ended, or has given up waiting
            stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident])[-_STACK_FRAMES:]
            text = f"rank {self._me.rank} has not moved for {patience_s:.0f} s and stands here (most recent call last):"
            print(f"{text}\n{''.join(stack)}", end="", file=sys.stderr, flush=True)

    def _wait_for_end(self, connection: socket.socket, place: Place, give_up: Callable[[LaunchError], None]) -> None:
        lost, farewell = None, b""
        try:
            farewell = connection.recv(1)
        except ConnectionError:
            pass
        except OSError as error:
            lost = _words(error)
        if lost is None and not farewell and not self._closed:
            time.sleep(_GRACE_S)
        if farewell or self._closed:
            return
        if lost is not None:
            give_up(LaunchError(self._lost([other for other in self.places if other.machine == place.machine], lost)))
            return
        error = LaunchError(f"{place} has ended before its work was done, without a word")
        error.__cause__ = ConnectionResetError()  # what launchers.failure takes for a consequence
        give_up(error)

    def _lost(self, places: list[Place], why: str) -> str:
        names = ", ".join(map(str, places))
        return f"{self._me} lost the connection to {names}: {why}. The network between them, or that machine, is down"

    def _exchange(self, what: str, mine: Any) -> list:
        """Gather what each rank gives, by rank."""
        keys = [f"{what}-{rank}" for rank in range(self._world.size)]
        self._store.set(keys[self._world.rank], json.dumps(mine))
        while missing := [rank for rank, key in enumerate(keys) if not self._store.check([key])]:
            if time.monotonic() > self._deadline:
                raise LaunchError(
                    f"rank {self._world.rank} heard nothing from rank {', '.join(map(str, missing))} any more: has it "
                    "ended, or lost its connection to rank 0?"
                )
            time.sleep(_POLL_S)
        return [json.loads(self._store.get(key)) for key in keys]


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


def _probe(places: list[Place], timeout_s: float) -> dict[Place, str | None]:
    """Connect to each of ``places``: why it does not work, in words, or None."""

    def ask(place: Place) -> str | None:
        try:
            with socket.create_connection((place.address, place.port), timeout=timeout_s):
                return None
        except TimeoutError:
            return f"no answer within {timeout_s:g} s"
        except OSError as error:
            return _words(error)

    with ThreadPoolExecutor(max(1, min(64, len(places)))) as pool:
        return dict(zip(places, pool.map(ask, places), strict=True))


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _keep_alive(connection: socket.socket, timeout_s: float) -> None:
    """Have the kernel take the other end for lost after a silence of two thirds of ``timeout_s``, but 4 s at least."""
    if not hasattr(socket, "TCP_KEEPIDLE"):
        return  # collectives notice it, in their own time
    every = max(1, int(timeout_s / (2 * _KEEPALIVES)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVES)


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
