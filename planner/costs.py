"""The seconds of a layer, of a collective and of the optimizer on a cluster."""

from __future__ import annotations

from math import ceil, log2

from planner.cluster import Cluster
from planner.work import LayerWork

WEIGHT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}  # as products read them


class Costs:
    """The seconds of one kind of work, by its size."""

    def __init__(self, cluster: Cluster, precision: str) -> None:
        self.cluster, self.bytes = cluster, WEIGHT_BYTES[precision]
        self.peak = cluster.peak[precision]

    def forward(self, layer: LayerWork, samples: int, tp: int = 1) -> float:
        """Seconds of a layer's forward on some samples, each of its products and of its parameters cut in ``tp``."""
        return self.products(layer, samples, tp) + self.attention(layer, samples, tp) + self.traffic(layer, samples, tp)

    def products(self, layer: LayerWork, samples: int, tp: int) -> float:
        """Seconds of the products with weights: computing, and reading the weights once."""
        cluster = self.cluster
        read = self.bytes * layer.parameters / tp / cluster.memory_bandwidth if layer.flops else 0.0
        return layer.flops * samples / tp / (self.peak * cluster.product) + read + layer.products * cluster.launch

    def attention(self, layer: LayerWork, samples: int, tp: int) -> float:
        """Seconds of attention's products."""
        return layer.attention * samples / tp / (self.peak * self.cluster.attention)

    def traffic(self, layer: LayerWork, samples: int, tp: int) -> float:
        """Seconds of what is bound by memory: a part of it is not cut by tensor parallelism."""
        share = 0.4 + 0.6 / tp
        return layer.moved * samples * share / (self.cluster.memory_bandwidth * self.cluster.traffic)

    def message(self, size: float, inside: bool) -> float:
        """Seconds of ``size`` bytes from one device to another."""
        link = self.cluster.inside if inside else self.cluster.between
        return link.latency + size / link.bandwidth

    def gather(self, size: float, ranks: int, per_node: int) -> float:
        """Seconds until each of some ranks has all ``size`` bytes, of which each had a part, or the reverse with sums.

        ``per_node`` of the ranks are on each node. A ring crosses each border between nodes once, and all links of the
        devices on that node serve it.
        """
        if ranks == 1:
            return 0.0
        cluster, latency, bandwidth = self.cluster, self.cluster.inside.latency, self.cluster.inside.bandwidth
        if ranks > per_node:
            latency, bandwidth = cluster.between.latency, min(bandwidth, cluster.between.bandwidth * per_node)
        return (ranks - 1) / ranks * size / bandwidth + ceil(log2(ranks)) * latency

    def reduce(self, size: float, ranks: int, per_node: int) -> float:
        """Seconds of an all-reduce."""
        return 2 * self.gather(size, ranks, per_node)

    def optimizer(self, parameters: float) -> float:
        """Seconds to update parameters: weight, gradient and two states are read, all but the gradient written."""
        return parameters * 28 / self.cluster.memory_bandwidth
