"""The torch.distributed store in which the ranks of a run meet, and a check that their machines can reach each other.

For workers of ``run_workers`` the store is a file in a folder that no other user can enter. For other ranks it is a TCP
store without authentication (SECURITY.md).
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from common.errors import LaunchError
from launchers import stopping
from launchers.heartbeat import Meeting, poll_s, watched
from launchers.world import LOOPBACK, STORE_FILE, Peer, World, is_loopback, master_address, restarts

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_POLL_S = 0.05
_NAME_S = 20.0  # how long rank 0's own name may be unknown: Kubernetes publishes a pod's after the pod has started
_PROBE_S, _PROBES = 5.0, 64  # of so many machines at once
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

# A store outlives its first process group. A second connect() in this process (a Python program under torchrun may call
# train() twice) uses the store again under another prefix, and so sees no keys of the first connection.
_opened: dict[str, Store] = {}
_connections = itertools.count()


def connect(world: World, timeout_s: float) -> Store | None:
    """Wait until all ranks have called this equally often, and return their common store.

    The workers of ``run_workers`` meet in a file of its private folder. Other ranks meet at MASTER_ADDR. There torchrun
    or otherwise rank 0 hosts the store, on a socket that listens on MASTER_ADDR only (torch's own listens on all
    interfaces). If MASTER_ADDR is a loopback address, this calls ``use_loopback``.

    Args:
        world: This rank's world.
        timeout_s: Seconds to wait for the other ranks; also the time-out of the store in later calls.

    Returns:
        The store; None if there is only one rank.

    Raises:
        LaunchError: If a rank does not connect in time (the message names it), if two processes have the same rank, or
            if rank 0 cannot listen.
    """
    if world.size == 1:
        return None
    from torch.distributed.distributed_c10d import PrefixStore

    number = next(_connections)
    if world.origin == "local":
        store = local_store(where := os.environ[STORE_FILE], world.size, timeout_s, number)
    else:
        host, port = master_address()
        if is_loopback(host):
            use_loopback()
        if (where := f"{host}:{port}") not in _opened:
            _opened[where] = _open(world, host, port, timeout_s)
        # A restarted attempt must not see the keys of the failed one (torch's env:// rendezvous does the same).
        store = PrefixStore(f"launchers/attempt-{restarts()}/connection-{number}", _opened[where])
    if store.add(f"rank-{world.rank}", 1) > 1:
        # With --rdzv-backend=c10d, an agent whose ranks had not failed starts them again without counting it.
        again = "; or torchrun has restarted the ranks, which on several machines needs --master-addr and --node-rank"
        raise LaunchError(
            f"two processes at {where} have RANK={world.rank} of WORLD_SIZE={world.size}: give each its own rank"
            f"{again if world.origin == 'torchrun' else ''}"
        )

    _exchange(world, store, "here", None, timeout_s)
    return store


def _exchange(world: World, store: Store, what: str, mine: Any, timeout_s: float) -> list:
    """Gather the values of all ranks, by rank.

    This polls the store, because wait() logs C++ frames after a time-out. Rank 0 reads all keys, and the other ranks
    read its result: a thousand ranks that ask for a thousand keys each would keep the store busy.
    """
    deadline, pause_s = time.monotonic() + timeout_s, poll_s(world.size)
    keys, gathered = [f"{what}-{rank}" for rank in range(world.size)], f"{what}-gathered"
    store.set(keys[world.rank], json.dumps(mine))
    while not store.check(keys if world.rank == 0 else [gathered]):
        if world.origin != "local" and stopping.wanted():  # the missing ranks may have ended
            raise stopping.Stopped(f"stopped while rank {world.rank} waited for the other ranks")
        if time.monotonic() > deadline:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise LaunchError(
                f"rank {world.rank} waited {timeout_s:g} s for {world.size} ranks: {world.size - len(missing)} came, "
                f"missing: {', '.join(missing)}. Have they ended? Start them with the same MASTER_ADDR, MASTER_PORT "
                "and WORLD_SIZE, or allow more time"
            )
        time.sleep(pause_s)
    if world.rank == 0:
        store.set(gathered, json.dumps([json.loads(store.get(key)) for key in keys]))
    given = json.loads(store.get(gathered))
    store.add(f"seen-{what}", 1)
    # The store may end with this process: it stays until the other ranks have read the result.
    while world.rank == 0 and store.add(f"seen-{what}", 0) < world.size and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return given


def local_store(path: str | os.PathLike, ranks: int = -1, timeout_s: float = 300.0, connection: int = 0) -> Store:
    """Return the store of the workers of ``run_workers``, in a worker or in the launching process."""
    from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]  # documented

    where = str(path)
    if where not in _opened:
        _opened[where] = FileStore(where, ranks)
        _opened[where].set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(f"connection-{connection}", _opened[where])


def _open(world: World, host: str, port: int, timeout_s: float) -> Store:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented

    timeout = timedelta(seconds=timeout_s)
    if world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listener = _listen_as_rank_0(world, host, port)
        address, descriptor = listener.getsockname()[0], listener.detach()
        return TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)
    address = _wait_for_listener(world, host, port, timeout_s)
    return TCPStore(address, port, None, False, timeout, wait_for_workers=False)


def _listen_as_rank_0(world: World, host: str, port: int) -> socket.socket:
    try:
        listener = _retry(lambda left_s: listen(host, port), socket.gaierror, _NAME_S)
    except OSError as error:
        raise LaunchError(
            f"rank 0 cannot listen on MASTER_ADDR={host} MASTER_PORT={port}: {error}. "
            "MASTER_ADDR must be an address of rank 0's machine, MASTER_PORT a port that nothing there uses"
        ) from error
    address = listener.getsockname()[0]
    # With SLURM a loopback address comes from its own configuration, and all of its nodes are this machine.
    if is_loopback(address) and world.local_size < world.size and world.origin != "slurm":
        listener.close()
        elsewhere = world.size - world.local_size
        raise LaunchError(
            f"MASTER_ADDR={host} is {address} on rank 0's machine, which the {elsewhere} ranks "
            "on other machines cannot reach: set it to the address by which they know this machine"
        )
    return listener


def _wait_for_listener(world: World, host: str, port: int, timeout_s: float) -> str:
    def ask(left_s: float) -> str:
        with socket.create_connection((host, port), timeout=left_s) as probe:
            return probe.getpeername()[0]

    try:
        return _retry(ask, OSError, timeout_s)  # torch's client logs pages of C++ frames if there is no answer
    except OSError as error:
        raise LaunchError(
            f"rank {world.rank} waited {timeout_s:g} s for rank 0 on {host}:{port}, to meet all {world.size} ranks "
            f"there: {error}. Start rank 0 with the same MASTER_ADDR and MASTER_PORT, or allow more time"
        ) from error


def _retry(attempt: Callable[[float], Any], kind: type[OSError], timeout_s: float) -> Any:
    """Call ``attempt(seconds left)`` until it raises no error of ``kind``; return its result, or raise the last."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return attempt(max(0.1, deadline - time.monotonic()))
        except kind:
            if stopping.wanted():
                raise stopping.Stopped("stopped while the ranks had not met yet") from None
            if time.monotonic() + _POLL_S > deadline:
                raise
        time.sleep(_POLL_S)


# -- the machines of the ranks, and whether they can reach each other ------------------------------------------------


@contextmanager
def rendezvous(
    world: World, timeout_s: float, describe: Callable[[BaseException], tuple[int, str]] | None = None
) -> Iterator[World]:
    """Meet the other ranks, and show them the work of this rank while the block runs.

    Args:
        world: This rank's world.
        timeout_s: Seconds to wait for the other ranks.
        describe: Returns the exit code and the message of an error. If rank 0 ends with an error before all ranks are
            ready, the other ranks end with the same code and message.

    Yields:
        This rank's world with the ranks that have met; unchanged if there is only one rank.

    Raises:
        LaunchError: If ranks do not connect, if machines cannot reach each other, or if the block fails because ranks
            do not move. The message names the ranks.
    """
    if world.origin == "torchrun":
        stopping.stop_without_parent()
    store = connect(world, timeout_s)
    if store is None:
        yield world
        return
    peers = find_peers(world, store, timeout_s) if world.origin != "local" else []
    with watched(Meeting(world, store, peers, timeout_s), describe) as meeting:
        yield replace(world, meeting=meeting)


def find_peers(world: World, store: Store, timeout_s: float) -> list[Peer]:
    """Return the machine and address of each rank, by rank. All ranks must call this.

    One rank of each machine connects to one rank of each other machine, through the interface of gloo and NCCL:
    GLOO_SOCKET_IFNAME names it, otherwise it is the interface that leads to MASTER_ADDR (both variables are then set).

    Raises:
        LaunchError: On every rank, within ``timeout_s``, if two ranks cannot connect. The message names the pairs.
    """
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    with listen(local_address(), 0) as listener:
        address, port = listener.getsockname()[:2]
        mine = [world.rank, world.local_rank == 0, node, address, port]
        peers = [Peer(*peer) for peer in _exchange(world, store, "peer", mine, timeout_s)]
        me = peers[world.rank]
        leaders = [peer for peer in peers if peer.leader]
        others = [peer for peer in leaders if peer != me] if me.leader else []
        with ThreadPoolExecutor(_PROBES) as pool:
            answers = pool.map(partial(_probe, limit_s=min(_PROBE_S, timeout_s / 2)), others)
            failed = [f"{me} cannot connect to {peer}: {why}" for peer, why in zip(others, answers, strict=True) if why]
        failures = _exchange(world, store, "failures", failed, timeout_s)
    if lines := [line for lines in failures for line in lines]:
        advice = (
            "Allow connections between these machines (firewall, routes), or set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the interface of the network that joins them; this machine has "
            f"{_listed(_addresses())}"
        )
        raise LaunchError("\n".join([*lines, advice]))
    return peers


def _probe(peer: Peer, limit_s: float) -> str:
    """Connect to ``peer``; return the error in words, or an empty string if the connection succeeds."""
    try:
        with socket.create_connection((peer.address, peer.port), timeout=limit_s):
            return ""
    except TimeoutError:
        return f"no answer within {limit_s:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def describe_peers(peers: list[Peer]) -> str:
    """Describe which ranks are on which machine: "n1: ranks 0-1   n2: ranks 2-3"."""
    machines: dict[tuple[str, str], list[int]] = {}
    for peer in peers:
        machines.setdefault(peer.machine, []).append(peer.rank)
    names = [node for node, _ in machines]
    words = []
    for (node, address), ranks in machines.items():
        name = node if names.count(node) == 1 else f"{node} {address}"
        in_order = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
        numbers = f"{ranks[0]}-{ranks[-1]}" if in_order else ",".join(map(str, ranks))
        words.append(f"{name}: rank{'s' * (len(ranks) > 1)} {numbers}")
    return "   ".join(words)


# -- the interface that gloo and NCCL use ----------------------------------------------------------------------------


def use_loopback() -> None:
    """Let gloo and NCCL use the loopback interface, unless the user has named another interface.

    Call this before any process group exists. Otherwise both select the interface of the machine's host name and listen
    on the network.
    """
    _use_interface("lo" if sys.platform == "linux" else "lo0")


def local_address() -> str:
    """Return the address of the interface of gloo and NCCL: an IPv4 address if the interface has one.

    GLOO_SOCKET_IFNAME names the interface. Otherwise it is the interface that leads to MASTER_ADDR. The variables of
    gloo and NCCL are then set to its name, unless the user has set them.

    Raises:
        LaunchError: If the named interface does not exist, or if none leads to MASTER_ADDR.
    """
    host, port = master_address()
    addresses = _addresses()
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        if (first := named.split(",")[0]) not in addresses:
            raise LaunchError(
                f"GLOO_SOCKET_IFNAME={named} names no interface of this machine with an address; there are "
                f"{_listed(addresses)}; unset it, or name one of them"
            )
        return addresses[first][0]
    if is_loopback(host):
        return LOOPBACK
    try:
        family, _, _, _, there = _preferred(host, port, socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing, but reads the routing table
            address = probe.getsockname()[0]
    except OSError as error:
        raise LaunchError(f"this machine has no route to MASTER_ADDR={host}: {error}") from error
    for name in (name for name, its in addresses.items() if address in its):
        _use_interface(name)
    return address


def _use_interface(name: str) -> None:
    for variable in _INTERFACES:
        if not os.environ.get(variable):
            os.environ[variable] = name


def _addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface, IPv4 first, without link-local IPv6 addresses."""
    import psutil

    found: dict[str, list[str]] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, addresses in psutil.net_if_addrs().items():
            usable = [a.address for a in addresses if a.family == family and not a.address.startswith("fe80")]
            if usable:
                found.setdefault(name, []).extend(usable)
    return found


def _listed(addresses: dict[str, list[str]]) -> str:
    return ", ".join(f"{name} ({its[0]})" for name, its in addresses.items())


def _preferred(host: str, port: int, kind: socket.SocketKind) -> tuple:
    """Return the entry of ``socket.getaddrinfo`` for a host, for IPv4 if there is one."""
    return min(socket.getaddrinfo(host, port, type=kind), key=lambda entry: entry[0] != socket.AF_INET)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address of ``host`` only; port 0 selects a free port.

    IPv4 is preferred: a client of "localhost" tries both families, while a socket listens on one.
    """
    family, *_, address = _preferred(host, port, socket.SOCK_STREAM)
    return socket.create_server(address, family=family, backlog=1024)
