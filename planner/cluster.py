"""A cluster on paper: nodes, devices, links, and how near to their peaks computations come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from common.errors import PlanError


@dataclass(frozen=True)
class Link:
    """What joins devices.

    Attributes:
        bandwidth: Bytes per second that a device sends while it receives as many.
        latency: Seconds of a message, however short.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """What ``conf/cluster/NAME.yaml`` describes.

    Attributes:
        nodes: The number of machines.
        devices: Devices of each.
        device: The kind of device, in words.
        peak: FLOP/s of dense products by precision.
        memory: Bytes of a device.
        memory_bandwidth: Bytes per second to and from it.
        inside: The link between devices of a node.
        between: The link of a device to other nodes: its share of the node's.
        product: The part of ``peak`` that large products reach.
        attention: The same of attention's products.
        traffic: The part of ``memory_bandwidth`` that other operators reach; above 1 where they are fused.
        launch: Seconds until a product has begun.
        message: The part of ``between.bandwidth`` that a single message reaches.
        step: Seconds of a step that are in no other part.
        reserved: Bytes of a device that no tensor gets: the context, and what the allocator cannot use.
        source: Where the efficiencies come from.
    """

    nodes: int
    devices: int
    device: str
    peak: Mapping[str, float]
    memory: float
    memory_bandwidth: float
    inside: Link
    between: Link
    product: float
    attention: float
    traffic: float
    launch: float
    message: float
    step: float
    reserved: float
    source: str

    @property
    def size(self) -> int:
        """The number of all devices."""
        return self.nodes * self.devices


def read_cluster(section: Mapping[str, Any]) -> Cluster:
    """Return the cluster that a section of the configuration describes.

    Raises:
        PlanError: A number is missing or impossible; the message names it.
    """
    given = {key: value for key, value in section.items() if key != "name"}
    named = f"cluster={section.get('name', '')}"
    known = [one.name for one in fields(Cluster)]
    if wrong := sorted({*known} ^ {*given}):
        problem = "lacks" if wrong[0] in known else "does not know"
        raise PlanError(f"{named} {problem} {', '.join(wrong)}; conf/cluster/a100x64.yaml shows what a cluster needs")
    flat = {key: value for key, value in given.items() if key not in ("device", "source", "peak", "inside", "between")}
    for key in ("peak", "inside", "between"):
        if not hasattr(given[key], "items"):
            raise PlanError(f"{named}: {key}={given[key]} must be numbers by name")
        flat |= {f"{key}.{name}": number for name, number in given[key].items()}
    for link in ("inside", "between"):
        if {*given[link]} != {"bandwidth", "latency"}:
            raise PlanError(f"{named}: {link} must have bandwidth and latency, and no more")
    for key, number in flat.items():
        free = key in ("launch", "step", "reserved", "inside.latency", "between.latency")  # may be 0
        if type(number) not in (int, float) or not (number > 0 or (free and number == 0)):
            raise PlanError(f"{named}: {key}={number} must be a number above 0")
        if key in ("product", "attention") and number > 1:
            raise PlanError(f"{named}: {key}={number} is the part of the peak that is reached, and at most 1")
        if key in ("nodes", "devices") and type(number) is not int:
            raise PlanError(f"{named}: {key}={number} must be a whole number")
    links = {link: Link(**given[link]) for link in ("inside", "between")}
    peak = dict(given["peak"])
    if "bf16" in peak:
        peak.setdefault("bf16_residual", peak["bf16"])  # the same products
    return Cluster(**{**given, **links, "peak": peak})
