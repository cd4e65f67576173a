"""The seconds of a layer, of a collective and of the optimizer, on a cluster that is only described."""

from __future__ import annotations

from math import ceil, log2

from planner.cluster import Cluster
from planner.work import LayerWork

_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}  # of a number, as products read it
_UPDATED = 28  # bytes moved for a parameter: weight, gradient and two states are read, all but the gradient written
_NOT_CUT = 0.4  # the part of a layer's traffic outside its products that tensor parallelism leaves whole


class PaperCosts:
    """The seconds of one kind of work, by its size.

    Attributes:
        devices: Devices of a node.
        itemsize: Bytes of a number as products read it.
        fixed: Seconds of a step that are in no other part.
    """

    def __init__(self, cluster: Cluster, precision: str) -> None:
        self.cluster, self.peak = cluster, cluster.peak[precision]
        self.devices, self.itemsize, self.fixed = cluster.devices, _BYTES[precision], cluster.step
        self._known: dict[tuple[LayerWork, int, int], float] = {}

    def forward(self, work: LayerWork, samples: int, tp: int = 1) -> float:
        """Seconds of a layer's forward on some samples, with its products and its parameters cut in ``tp``."""
        if (known := self._known.get((work, samples, tp))) is None:
            known = self._known[work, samples, tp] = self._forward(work, samples, tp)
        return known

    def _forward(self, work: LayerWork, samples: int, tp: int) -> float:
        cluster, share = self.cluster, _NOT_CUT + (1 - _NOT_CUT) / tp
        read = self.itemsize * work.parameters / tp / cluster.memory_bandwidth if work.flops else 0.0
        products = work.flops * samples / tp / (self.peak * cluster.product) + read + work.products * cluster.launch
        traffic = work.moved * samples * share / (cluster.memory_bandwidth * cluster.traffic)
        return products + traffic + self.attention(work, samples, tp)

    def backward(self, work: LayerWork, samples: int, tp: int = 1) -> float:
        """Seconds of a layer's backward."""
        return 2 * self.forward(work, samples, tp)

    def attention(self, work: LayerWork, samples: int, tp: int = 1) -> float:
        """Seconds of the products of attention in a forward."""
        return work.attention * samples / tp / (self.peak * self.cluster.attention)

    def message(self, size: float, inside: bool) -> float:
        """Seconds of ``size`` bytes from one device to another, in the same node or not."""
        link = self.cluster.inside if inside else self.cluster.between
        return link.latency + size / (link.bandwidth * (1.0 if inside else self.cluster.message))

    def gather(self, size: float, ranks: int, per_node: int) -> float:
        """Seconds until each of some ranks has all ``size`` bytes, of which each had a part; or the reverse, with sums.

        ``per_node`` of the ranks are on each node. A ring crosses each border between nodes once, and the links of all
        its devices on a node serve it.
        """
        if ranks == 1:
            return 0.0
        link, bandwidth = self.cluster.inside, self.cluster.inside.bandwidth
        if ranks > per_node:
            link, bandwidth = self.cluster.between, min(bandwidth, self.cluster.between.bandwidth * per_node)
        return (ranks - 1) / ranks * size / bandwidth + ceil(log2(ranks)) * link.latency

    def reduce(self, size: float, ranks: int, per_node: int) -> float:
        """Seconds of an all-reduce of ``size`` bytes, as ``gather``."""
        return 2 * self.gather(size, ranks, per_node)

    def optimizer(self, parameters: float) -> float:
        """Seconds to update parameters."""
        return parameters * _UPDATED / self.cluster.memory_bandwidth
