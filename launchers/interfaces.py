"""The network interface that the ranks of a run use."""

from __future__ import annotations

import os
import socket

from common.errors import LaunchError
from launchers.loopback import LOOPBACK, is_loopback
from launchers.world import master_address


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


def advice() -> str:
    """Say what a user can do where machines cannot reach each other."""
    return (
        "Open the way between these machines (firewall, routes), or name the interface of the network that joins them: "
        f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; here there are {_listed(_addresses())}"
    )
