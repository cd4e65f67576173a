"""The description of a cluster: nodes, devices, links, and the fractions of their peaks that computations reach."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from common.errors import PlanError

# Bytes per number, as products read it, by precision.
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "bf16_residual": 2, "fp16": 2}
# Generous limits for each number. A number beyond them is a typing error or has the wrong unit.
_RANGES = {
    "nodes": (1, 100_000), "devices": (1, 1_000), "memory": (1e6, 1e15), "memory_bandwidth": (1e6, 1e17),
    "bandwidth": (1e3, 1e16), "latency": (0, 10), "product": (1e-4, 1), "attention": (1e-4, 1),
    "attention_half": (0, 1e6), "traffic": (1e-4, 1), "launch": (0, 10), "message": (1e-4, 1), "step": (0, 3600),
    "reserved": (0, 1e15), **dict.fromkeys(BYTES, (1e6, 1e18)),
}  # fmt: skip
_MOST = 1_000_000  # devices in all nodes: a search tries all divisors of their number


@dataclass(frozen=True)
class Link:
    """A link between devices.

    Attributes:
        bandwidth: Bytes per second in each direction; both directions can be used at once.
        latency: Seconds to send an empty message.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """A cluster, as ``conf/cluster/NAME.yaml`` describes it.

    Attributes:
        nodes: The number of machines.
        devices: The number of devices per machine.
        device: The kind of device, in words.
        peak: FLOP/s of dense products, by precision.
        memory: Bytes per device.
        memory_bandwidth: Bytes per second, reads and writes together.
        inside: The link between devices of a node.
        between: The link of a device to other nodes: its share of the node's link.
        product: The fraction of ``peak`` that large matrix products reach.
        attention: The fraction of ``peak`` that attention's products reach in long sequences.
        traffic: The fraction of ``memory_bandwidth`` that other operators reach.
        launch: Seconds to launch a product.
        message: The fraction of ``between.bandwidth`` that a single message reaches.
        step: Seconds per step that no other part accounts for.
        reserved: Bytes per device that tensors cannot use: the context and fragmentation.
        source: The origin of the efficiencies.
        guess: Whether some numbers were neither measured nor fitted to measured layouts of a comparable cluster.
        attention_half: The tokens of a sequence in which attention reaches half of ``attention``.
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
    attention_half: float = 0.0
    guess: bool = False

    @property
    def size(self) -> int:
        """The number of all devices."""
        return self.nodes * self.devices


def read_cluster(section: Mapping[str, Any]) -> Cluster:
    """Return the cluster that a section of the configuration describes.

    Raises:
        PlanError: If a number is missing or impossible; the message names the number.
    """
    given, name = {**section}, section.get("name")
    named = "the cluster's file" if name is None else f"cluster={name} (cluster/{name}.yaml)"
    needed = {"name": True} | {one.name: one.default is MISSING for one in fields(Cluster)}
    if unknown := sorted({*given} - {*needed}):
        raise PlanError(f"{named} does not know {', '.join(unknown)}; its keys are {', '.join(needed)}")
    if lacking := sorted(key for key in needed if needed[key] and key not in given):
        raise PlanError(
            f"{named} lacks {', '.join(lacking)}; a file of conf/cluster/device has all but nodes and devices: "
            "name it as conf/cluster/a100x64.yaml does"
        )
    del given["name"]
    flat = {key: value for key, value in given.items() if key in _RANGES}
    for key in ("peak", "inside", "between"):
        if not hasattr(given[key], "items"):
            raise PlanError(f"{named}: {key}={reprlib.repr(given[key])} must be numbers by name")
        flat |= {f"{key}.{name}": number for name, number in given[key].items()}
    for link in ("inside", "between"):
        if {*given[link]} != {"bandwidth", "latency"}:
            raise PlanError(f"{named}: {link} must have bandwidth and latency, and has {', '.join(given[link])}")
    if wrong := sorted({*given["peak"]} - {*BYTES}):
        raise PlanError(f"{named}: peak has {', '.join(wrong)}; the precisions are {', '.join(BYTES)}")
    for key, number in flat.items():
        least, most = _RANGES[key.rpartition(".")[2]]
        whole = key in ("nodes", "devices")
        if type(number) not in ((int,) if whole else (int, float)) or not least <= number <= most:
            kind = "whole number" if whole else "number"
            raise PlanError(f"{named}: {key}={reprlib.repr(number)} must be a {kind} from {least:,g} to {most:,g}")
    if (size := given["nodes"] * given["devices"]) > _MOST:
        raise PlanError(f"{named}: nodes x devices={size:,} must be at most {_MOST:,}")
    links = {link: Link(**given[link]) for link in ("inside", "between")}
    peak = dict(given["peak"])
    if "bf16" in peak:
        peak.setdefault("bf16_residual", peak["bf16"])  # the same products
    return Cluster(**{**given, **links, "peak": peak})
