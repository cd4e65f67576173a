"""The seconds of layers, collectives and the optimizer, on a described cluster and on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil

from parallel.axes.axis import Collective
from parallel.schedules import SCHEDULES
from planner.cluster import BYTES, Cluster
from planner.here import Here, Line
from planner.work import LayerWork

_UPDATED = 28  # bytes moved per parameter: reads weight, gradient and two states; writes all but the gradient
# Layers that are measured one by one find their data in a CPU's caches. Fitted to runs of six small models.
_IN_TURN = 1.1


class PaperCosts:
    """The seconds of each kind of work on a described cluster.

    Attributes:
        devices: Devices of a node.
        itemsize: Bytes per number in matrix products.
        gathered: Bytes per number of a sharded parameter when ranks gather the parameter.
        hides: The fractions of the communication of gradients and of shards that can overlap with computation.
    """

    hides = 0.9, 0.5

    def __init__(self, cluster: Cluster, precision: str) -> None:
        self.cluster, self.peak = cluster, cluster.peak[precision]
        self.devices, self.itemsize, self.gathered = cluster.devices, BYTES[precision], BYTES[precision]
        self.forward = cache(self._forward)

    def _forward(self, work: LayerWork, samples: int) -> float:
        """Seconds of a layer's forward, or of a rank's part of it, on some samples."""
        cluster = self.cluster
        read = self.itemsize * work.parameters / cluster.memory_bandwidth if work.flops else 0.0
        products = work.flops * samples / (self.peak * cluster.product) + read + work.products * cluster.launch
        traffic = work.moved * samples / (cluster.memory_bandwidth * cluster.traffic)
        return products + traffic + self.attention(work, samples)

    def backward(self, work: LayerWork, samples: int) -> float:
        """Seconds of a layer's backward."""
        return 2 * self.forward(work, samples)

    def begin(self, work: LayerWork, samples: int) -> float:
        """Extra seconds of the first micro-batch of a step."""
        return 0.0

    def slowed(self, busy: float, samples: int) -> float:
        """Return 1: no two ranks share a device."""
        return 1.0

    def attention(self, work: LayerWork, samples: int) -> float:
        """Seconds of the products of attention in a forward."""
        longer = 1 + self.cluster.attention_half / work.length if work.attention else 0.0
        return (work.attention - work.masked) * samples / (self.peak * self.cluster.attention) * longer

    def message(self, size: float, inside: bool, schedule: str) -> float:
        """Seconds to send ``size`` bytes to the next stage, within a node or between nodes."""
        link = self.cluster.inside if inside else self.cluster.between
        return link.latency + size / (link.bandwidth * (1.0 if inside else self.cluster.message))

    def gather(self, size: float, ranks: int, per_node: int, held: Sequence[LayerWork] = ()) -> float:
        """Seconds of an all-gather of ``size`` bytes in total, or of the reduce-scatter that reverses it.

        Each node has ``per_node`` of the ranks. The ring crosses each border between nodes once, and on a node it uses
        the links of all its devices. Each layer of ``held`` that has parameters is gathered separately.
        """
        if ranks == 1:
            return 0.0
        inside, between = self.cluster.inside, self.cluster.between
        nodes = ceil(ranks / per_node)
        bandwidth = inside.bandwidth if nodes == 1 else min(inside.bandwidth, between.bandwidth * per_node)
        latency = (ranks - nodes) * inside.latency + (nodes - 1) * between.latency
        times = sum(work.parameters > 0 for work in held) or 1
        return (ranks - 1) / ranks * size / bandwidth + times * latency

    def copy(self, size: float) -> float:
        """Seconds to copy parameters from, or gradients to, the buffer of a collective, as FSDP2 does."""
        return 2 * size / (self.cluster.memory_bandwidth * self.cluster.traffic)

    def hooks(self, held: Sequence[LayerWork]) -> float:
        """Seconds that sharding adds to a micro-batch in which nothing is gathered or reduced."""
        return 0.0

    def reduce(self, size: float, ranks: int, per_node: int) -> float:
        """Seconds of an all-reduce of ``size`` bytes. See ``gather`` for the arguments."""
        return 2 * self.gather(size, ranks, per_node)

    def collective(self, kind: str, size: float, ranks: int, per_node: int) -> float:
        """Seconds of a collective of ``parallel.axes.axis.Collective``, of ``size`` bytes. See also ``gather``."""
        if kind == "all_reduce":
            return self.reduce(size, ranks, per_node)
        if kind == "ring":  # an all-gather is ranks - 1 such exchanges
            return self.gather(ranks * size, ranks, per_node) / (ranks - 1)
        if kind == "all_to_all":  # each pair of ranks exchanges a part; a rank has its own share of the network
            near, far = min(ranks, per_node) - 1, max(0, ranks - per_node)
            links = (near, self.cluster.inside), (far, self.cluster.between)
            return sum(peers * (size / ranks / link.bandwidth + link.latency) for peers, link in links)
        return self.gather(size, ranks, per_node)

    def fixed(self, dp: int, reduced: int) -> float:
        """Seconds per step that no other part accounts for, if the gradients of ``reduced`` stages are reduced."""
        return self.cluster.step

    def optimizer(self, parameters: float) -> float:
        """Seconds to update parameters."""
        return parameters * _UPDATED / self.cluster.memory_bandwidth


class MeasuredCosts:
    """The seconds of each kind of work on this machine. The interface is that of ``PaperCosts``."""

    def __init__(self, here: Here, precision: str, on_gpus: bool) -> None:
        self.here, self.devices, self.itemsize, self.gathered = here, here.processes, BYTES[precision], 4
        self.hides = PaperCosts.hides if on_gpus else (0.0, 0.0)  # on CPUs, communication needs a core, too
        self._in_turn = 1.0 if on_gpus else _IN_TURN
        self._layers = {layer.name: layer for layer in here.layers}

    def forward(self, work: LayerWork, samples: int) -> float:
        """See PaperCosts. Layers are measured whole."""
        return self._in_turn * self._layers[work.name].forward(samples)

    def backward(self, work: LayerWork, samples: int) -> float:
        """See PaperCosts."""
        return self._in_turn * max(0.0, self._layers[work.name].backward(samples) - self.here.overhead)

    def begin(self, work: LayerWork, samples: int) -> float:
        """Extra seconds of a step's first micro-batch, which casts the weights but does not accumulate gradients."""
        first = self._in_turn * max(0.0, self._layers[work.name].first(samples) - self.here.overhead)
        return first - self.forward(work, samples) - self.backward(work, samples)

    def slowed(self, busy: float, samples: int) -> float:
        """Return the slowdown of a process while ``busy`` processes compute, relative to ``at_once`` processes.

        If there are more processes than cores, they take turns.
        """
        most = self.here.at_once
        if busy >= most:
            return busy / most
        alone = sum(layer.alone(samples) for layer in self.here.layers)
        together = sum(layer.forward(samples) + layer.backward(samples) for layer in self.here.layers)
        return alone / together + (1 - alone / together) * (max(1.0, busy) - 1) / max(1, most - 1)

    def attention(self, work: LayerWork, samples: int) -> float:
        """Return 0: selective recomputation is not offered on this machine."""
        return 0.0

    def message(self, size: float, inside: bool, schedule: str) -> float:
        """See PaperCosts."""
        return self.here.messages["interleaved_1f1b" if SCHEDULES[schedule].looped else schedule](size)

    def gather(self, size: float, ranks: int, per_node: int, held: Sequence[LayerWork] = ()) -> float:
        """See PaperCosts."""
        line = self.here.shards  # the time that does not depend on the size is mostly successive messages
        return (ranks / self.here.processes * self._of_layers(line, held) + line.each * self._of_ring(size, ranks)) / 3

    def copy(self, size: float) -> float:
        """Return 0: ``gather`` was measured with the copies."""
        return 0.0

    def hooks(self, held: Sequence[LayerWork]) -> float:
        """See PaperCosts."""
        return self._of_layers(self.here.hooks, held)

    def _of_layers(self, line: Line, held: Sequence[LayerWork]) -> float:
        """Return the part of the seconds that does not depend on the size."""
        return sum(line.fixed + line.piece * work.tensors for work in held if work.parameters)

    def reduce(self, size: float, ranks: int, per_node: int) -> float:
        """See PaperCosts. The part that does not depend on the size is ``fixed``."""
        return self.here.replicas.each * self._of_ring(size, ranks)

    def collective(self, kind: str, size: float, ranks: int, per_node: int) -> float:
        """See PaperCosts. A byte that is sent takes as long as in an all-reduce."""
        like = Collective(kind, 1, size, 1).sent(ranks) * ranks / (2 * (ranks - 1))
        return self.reduce(like, ranks, per_node)

    def fixed(self, dp: int, reduced: int) -> float:
        """See PaperCosts."""
        return self.here.step + (reduced * dp / self.here.processes * self.here.replicas.fixed if dp > 1 else 0.0)

    def _of_ring(self, size: float, ranks: int) -> float:
        """Return the bytes for which a collective over all processes takes as long as ``size`` bytes over ``ranks``."""
        most = self.here.processes
        return size * (ranks - 1) / ranks * most / (most - 1) if ranks > 1 else 0.0

    def optimizer(self, parameters: float) -> float:
        """See PaperCosts."""
        return self.here.update(parameters)


Costs = PaperCosts | MeasuredCosts
