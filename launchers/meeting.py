"""Where the ranks of a run meet: a torch.distributed store.

On one machine it is a file in a folder that no other user can enter. Over several machines it is a TCP store without
authentication (SECURITY.md).
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from common.errors import LaunchError
from launchers.world import LOOPBACK, STORE_FILE, World, is_loopback, master_address, restarts

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 0.05
_NAME_S = 20.0  # how long rank 0's own name may be unknown: Kubernetes publishes a pod's after the pod has started
_ANSWER_S = 20.0  # a store answers from a thread of its own, however busy its process is

# A store outlives the first process group that used it. A second connect() in this process (one job of a sweep after
# another, under one torchrun) reuses it under a prefix of its own, so that it sees none of the first one's keys.
_opened: dict[str, Store] = {}
_connections = itertools.count()


def connect(world: World, timeout_s: float) -> Store | None:
    """Wait until all ranks have called this, each of them equally often; return the store that they share.

    Those that ``run_workers`` has started meet in a file of its private folder. Others meet at MASTER_ADDR, where
    torchrun hosts a store, or else rank 0, on a socket that listens on MASTER_ADDR alone (torch's own would listen on
    all interfaces). Where all of them are on one machine, they go on from there to a file in a private folder of rank
    0's. Where MASTER_ADDR is a loopback address, ``use_loopback`` is called too.

    Args:
        world: This rank's place.
        timeout_s: How long to wait for the others, in seconds; also the store's own time-out for later calls.

    Returns:
        The store; None where there is one rank only.

    Raises:
        LaunchError: A rank does not come in time (it is named), two processes have the same rank, rank 0 cannot
            listen, or its folder is not one that only this user can enter.
    """
    if world.size == 1:
        return None
    from torch.distributed import PrefixStore

    deadline, number = time.monotonic() + timeout_s, next(_connections)
    if world.origin == "local":
        use_loopback()
        store = local_store(where := os.environ[STORE_FILE], world.size, timeout_s, number)
        _gather(store, world, where, timeout_s, deadline)
        return store
    host, port = master_address()
    if is_loopback(host):
        use_loopback()
    if (where := f"{host}:{port}") not in _opened:
        _opened[where] = _open(world, host, port, timeout_s)
    # A restarted attempt must not see the keys of the failed one (torch's env:// rendezvous does the same).
    store = PrefixStore(f"launchers/attempt-{restarts()}/connection-{number}", _opened[where])
    _gather(store, world, where, timeout_s, deadline)
    return _private_store(store, world, timeout_s) if world.local_size == world.size else store


def local_store(path: str | os.PathLike, ranks: int = -1, timeout_s: float = 300.0, connection: int = 0) -> Store:
    """Return the store that workers of ``run_workers`` meet in, also for the process that has started them."""
    from torch.distributed import PrefixStore

    where = str(path)
    if where not in _opened:
        _opened[where] = _open_file(where, ranks, timeout_s)
    return PrefixStore(f"connection-{connection}", _opened[where])


def _private_store(store: Store, world: World, timeout_s: float) -> Store:
    """Go on from a store that others can reach to a file that they cannot; only its name goes through the first one."""
    if world.rank == 0:
        folder = tempfile.mkdtemp(prefix="launchers-")  # only this user can enter it
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        store.set("folder", folder)
    else:
        store.wait(["folder"], timedelta(seconds=timeout_s))
        folder = store.get("folder").decode()
        if not _is_private(folder):
            raise LaunchError(
                f"rank {world.rank} cannot use rank 0's folder {folder!r}, in which the ranks of one machine meet: it "
                "must be there for all of them (the same TMPDIR, not in containers of their own) and this user's "
                "alone. Where ranks do not share their files, set LOCAL_WORLD_SIZE to the number of those that do"
            )
    return _open_file(os.path.join(folder, "store"), world.size, timeout_s)


def _is_private(folder: str) -> bool:
    """Return whether it is a folder of this user that nobody else can enter."""
    try:
        status = os.lstat(folder)
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _open_file(path: str, ranks: int, timeout_s: float) -> Store:
    from torch.distributed import FileStore

    store = FileStore(path, ranks)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _open(world: World, host: str, port: int, timeout_s: float) -> Store:
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=timeout_s)
    if world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listener = _listen_as_rank_0(world, host, port)
        address, descriptor = listener.getsockname()[0], listener.detach()
        return TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)
    address = _wait_for_listener(world, host, port, timeout_s)
    joined: list[Store] = []

    def join() -> None:
        with suppress(Exception):
            joined.append(TCPStore(address, port, None, False, timeout, wait_for_workers=False))

    # A thread, as torch 2.13's client waits for ever, whatever its timeout, for a server that accepts and is silent.
    joining = threading.Thread(target=join, name="join-store", daemon=True)
    joining.start()
    joining.join(min(timeout_s, _ANSWER_S))
    if not joined:
        raise LaunchError(
            f"rank {world.rank} reached {host}:{port}, but no store of rank 0 answers there: does another program hold "
            "MASTER_PORT? Choose a port that nothing uses"
        )
    return joined[0]


def _listen_as_rank_0(world: World, host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _NAME_S
    try:
        while True:
            try:
                listener = listen(host, port)
                break
            except socket.gaierror:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)
    except OSError as error:
        raise LaunchError(
            f"rank 0 cannot listen on MASTER_ADDR={host} MASTER_PORT={port}: {error}. "
            "MASTER_ADDR must be an address of rank 0's machine, MASTER_PORT a port that nothing there uses"
        ) from error
    address = listener.getsockname()[0]
    # Of SLURM, loopback is what its own configuration says: all of its nodes are this machine.
    if is_loopback(address) and world.local_size < world.size and world.origin != "slurm":
        listener.close()
        elsewhere = world.size - world.local_size
        raise LaunchError(
            f"MASTER_ADDR={host} is {address} on rank 0's machine, which the {elsewhere} ranks "
            "on other machines cannot reach: set it to the address by which they know this machine"
        )
    return listener


def _wait_for_listener(world: World, host: str, port: int, timeout_s: float) -> str:
    # Python asks first: torch's client logs pages of C++ frames while nobody answers.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            with socket.create_connection((host, port), timeout=left) as probe:
                return probe.getpeername()[0]
        except OSError as error:
            if time.monotonic() + _POLL_S > deadline:
                raise LaunchError(
                    f"rank {world.rank} waited {timeout_s:g} s for rank 0 on {host}:{port}, to meet "
                    f"all {world.size} ranks there: {error}. Start rank 0 with the same MASTER_ADDR and "
                    "MASTER_PORT, or allow more time"
                ) from error
        time.sleep(_POLL_S)


def _gather(store: Store, world: World, where: str, timeout_s: float, deadline: float) -> None:
    """Return when all ranks are here. It polls: a store's own wait() logs C++ frames when it times out."""
    if store.add(f"rank-{world.rank}", 1) > 1:
        raise LaunchError(
            f"two processes at {where} say that they are RANK={world.rank} of WORLD_SIZE={world.size}: "
            "give each its own rank"
        )
    store.add("here", 1)
    while store.add("here", 0) < world.size:
        if time.monotonic() > deadline:
            missing = [rank for rank in range(world.size) if not store.check([f"rank-{rank}"])]
            raise LaunchError(
                f"rank {world.rank} waited {timeout_s:g} s at {where} for {world.size} ranks: "
                f"{world.size - len(missing)} came, missing: {', '.join(map(str, missing))}. "
                "Start them with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or allow more time"
            )
        time.sleep(_POLL_S)
    store.add("seen", 1)
    # The host stays until the others have seen that all are here: they could not ask any more.
    while world.rank == 0 and store.add("seen", 0) < world.size and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def use_loopback() -> None:
    """Let gloo and NCCL use the loopback interface, unless the user named another; before any process group exists.

    Without it both pick the interface of the machine's host name and listen to the network.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if not os.environ.get(name):
            os.environ[name] = _loopback_interface()


def check_interfaces() -> None:
    """Raise LaunchError where gloo will not find the interface that it is told to use, or no address on it."""
    names = [name for _, name in socket.if_nameindex()]
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")
    if unknown := [name for name in (wanted or "").split(",") if name and name not in names]:
        raise LaunchError(
            f"GLOO_SOCKET_IFNAME={wanted}: {', '.join(unknown)} is no network interface of this machine, which has "
            f"{', '.join(names) or 'none'}; unset it, and the processes of this machine use the loopback interface"
        )
    if not wanted and not any(map(_is_up, (LOOPBACK, "::1"))):
        raise LaunchError(
            f"the loopback interface of this machine is down (neither {LOOPBACK} nor ::1 answers), and the processes "
            "of a run talk over it: ip link set lo up"
        )


def _is_up(address: str) -> bool:
    try:
        with listen(address, 0) as listener, socket.create_connection(listener.getsockname()[:2], timeout=2.0):
            return True
    except OSError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address of ``host`` only; port 0 stands for any free one.

    IPv4 is preferred: a client that asks for "localhost" tries both families, while a socket listens on one.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        # A port whose last owner has just left may be taken again at once.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    # Linux calls it lo, the BSDs and macOS lo0.
    for name in ("lo", "lo0"):
        if name in names:
            return name
    raise LaunchError(
        f"none of this machine's network interfaces ({', '.join(names) or 'there are none'}) is lo or lo0: "
        "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the one that carries 127.0.0.1"
    )
