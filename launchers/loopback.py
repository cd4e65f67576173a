"""Keeping a run's sockets on this machine."""

import ipaddress
import os
import socket

from common.errors import LaunchError

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by definition: localhost or a loopback address. Asks no name server."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def use_loopback() -> None:
    """Makes gloo and NCCL use the loopback interface, unless the user named another.

    Call it before any process group exists. Without it both pick the interface of the machine's host name and listen
    to the network.

    Raises:
        LaunchError: This machine has no loopback interface of a usual name.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if not os.environ.get(name):
            os.environ[name] = _loopback_interface()


def check_interfaces() -> None:
    """Checks that gloo will find the interface that it is told to use, and an address on it.

    Raises:
        LaunchError: GLOO_SOCKET_IFNAME names none of this machine's, or the loopback interface is down.
    """
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
    """A socket that listens on the address of `host` only.

    IPv4 is preferred: a client that asks for "localhost" tries both families, while a socket listens on one.

    Args:
        host: A name or address of this machine.
        port: The port; 0 for any free one.

    Returns:
        The listening socket.

    Raises:
        OSError: The address is not this machine's, or the port is taken.
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
