"""The ranks of a run as a mesh of named axes, and the process groups along them.

A mesh arranges the ranks in an array with one axis for each way to divide the work. For parallel=pipe_ddp with dp=2,
pp=2, and parallel.order=dp_pp (copies before pipeline: rank = replica x pp + position):

              position 0   position 1
    copy 0      rank 0       rank 1      <- along pipeline: neighbors exchange activations
    copy 1      rank 2       rank 3
                  ^- along copies: ranks 0 and 2 hold the same stages and average their gradients

With parallel.order=pp_dp, pipeline comes before copies, and the ranks are numbered down the columns.

A copy of the parameters belongs to one replica, or is sharded among the replicas along the axis shards. dp is the
number of ranks along copies and shards together: each replica computes different samples. For parallel=hsdp with dp=4
and shard=2:

              shard 0      shard 1
    copy 0    rank 0       rank 1        <- along shards: reduce-scatter, and shards of one copy
    copy 1    rank 2       rank 3
                ^- along copies: ranks 0 and 2 all-reduce their results of the reduce-scatter

With parallel.comm_hook=hierarchical each replica has its own copy, and the columns are peers: the peers of a row reduce
gradients within the row first. Peers and shards are different axes, so no flag has to say whether a group shards its
parameters.

Along experts, neighboring replicas share the experts of a model (``parallel.axes.experts``), within one group of shards
or peers.

Axes of a stage (``Layout.OF_STAGE``) are inside of these in both orders. Along tensor, the innermost of them, ranks
compute the same samples, each rank with a part of every layer (``parallel.axes.tensor``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.errors import LaunchError

# torch 2.13 renamed it and warns at the old name.
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

COPIES, PEERS, SHARDS, EXPERTS = "copies", "peers", "shards", "experts"
PIPELINE, TENSOR = "pipeline", "tensor"
REPLICAS = (COPIES, PEERS, SHARDS, EXPERTS)  # the axes along which ranks compute different samples
ORDERS = {"dp_pp": (*REPLICAS, PIPELINE), "pp_dp": (PIPELINE, *REPLICAS)}  # slowest first; axes of a stage follow


@dataclass
class Ranks:
    """The ranks that differ from this rank only along one axis, or along several axes together.

    Attributes:
        ranks: The ranks in order, including this rank.
        index: This rank's index in ``ranks``.
        group: The process group of the ranks; None before ``Mesh.connect``, and for a single rank.
    """

    ranks: list[int]
    index: int
    group: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in order. The tensors have the same shape. All ranks call this together."""
        return _all_gather(tensor, self.group)


class Mesh:
    """The mesh of ranks, seen from one rank.

    Attributes:
        sizes: The number of ranks along each axis, by the axis's name, slowest axis first.
        index: This rank's index along each axis, from 0.
        rank: This process's rank.
        size: The number of all ranks.
    """

    def __init__(self, sizes: Mapping[str, int], rank: int = 0) -> None:
        """Arrange the ranks. An axis that is not in ``sizes`` has one rank."""
        self.sizes, self.rank, self.size = dict(sizes), rank, math.prod(sizes.values())
        self._ranks = torch.arange(self.size).reshape(tuple(sizes.values()))
        self.index = dict(zip(sizes, (self._ranks == rank).nonzero()[0].tolist(), strict=True))
        self._axes: dict[tuple[str, ...], Ranks] = {}

    def axis(self, *names: str) -> Ranks:
        """Return the ranks along an axis, or several axes together, that have this rank's index on all other axes."""
        if names not in self._axes:
            # Axes that add the same ranks are treated as one axis, so that they use one group.
            several = tuple(name for name, size in self.sizes.items() if name in names and size > 1)
            if several not in self._axes:
                here = tuple(slice(None) if name in several else index for name, index in self.index.items())
                ranks = self._ranks[here].flatten().tolist()
                self._axes[several] = Ranks(ranks, ranks.index(self.rank))
            self._axes[names] = self._axes[several]
        return self._axes[names]

    def groups(self, *names: str) -> list[list[int]]:
        """Return all groups of ranks along one axis, or along several axes together."""
        along = [i for i, name in enumerate(self.sizes) if name in names]
        across = [i for i in range(len(self.sizes)) if i not in along]
        grouped = self._ranks.permute((*across, *along))
        return grouped.reshape(-1, math.prod(grouped.shape[len(across) :])).tolist()

    def owns(self, axes: Collection[str] = ()) -> bool:
        """Return whether this rank counts and saves its part of a tensor that is divided along ``axes``.

        The ranks along the other axes hold the same part, and the first of these ranks owns it. The positions of a
        pipeline hold different tensors.
        """
        return self.axis(*(self.sizes.keys() - {*axes, PIPELINE})).index == 0

    # -- replicas and positions --------------------------------------------------------------------------------------

    @property
    def dp(self) -> int:
        """The number of replicas."""
        return self.axis(*REPLICAS).size

    @property
    def replica(self) -> int:
        """The replica that this rank belongs to, from 0."""
        return self.axis(*REPLICAS).index

    @property
    def position(self) -> int:
        """This rank's position in its pipeline, from 0."""
        return self.axis(PIPELINE).index

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks that average their gradients."""
        return self.axis(*REPLICAS).group

    def pipeline(self, replica: int) -> list[int]:
        """Return the ranks of one pipeline, first stage to last. Of ranks with parts of one stage, only the first."""
        groups = self.groups(PIPELINE)
        return groups[replica * len(groups) // self.dp]

    def holders(self, position: int) -> list[int]:
        """Return the ranks that hold the stages of a position, or a part of each layer of these stages."""
        return self.groups(*self.sizes.keys() - {PIPELINE})[position]

    # -- communication -----------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float) -> Mesh:
        """Make the process groups along each axis, and along all axes of replicas together. Every rank calls this."""
        for names in (*((name,) for name in self.sizes), (PEERS, EXPERTS), (SHARDS, EXPERTS), REPLICAS):
            axis = self.axis(*names)
            if axis.group is None:
                axis.group = self.new_group(self.groups(*names), timeout_s)
        return self

    def disconnect(self) -> None:
        """Close the process groups of ``connect``. Every rank calls this when no rank uses the groups any more."""
        for axis in self._axes.values():
            if axis.group is not None:
                dist.destroy_process_group(axis.group)
                axis.group = None

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list:
        """Return every rank's value, by rank. All ranks of ``group`` (None: all ranks of the mesh) call this together.

        Values are sent as JSON in byte tensors, never as pickles. A foreign program that reaches the ranks' connections
        can therefore end the run but cannot execute code. Values consist of JSON types; tuples become lists.
        """
        mine = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(mine)]
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        longest = int(max(_all_gather(torch.tensor([len(mine)], device=device), group)))
        padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8).to(device)
        messages = _all_gather(padded, group)
        try:  # JSON ignores trailing spaces
            return [json.loads(message.cpu().numpy().tobytes()) for message in messages]
        except ValueError as error:
            raise LaunchError(
                f"a rank sent a message that is not JSON ({error}): the network has changed it, or another program "
                "talks to this run's ports (SECURITY.md). Start the run again"
            ) from None

    def new_group(self, groups: Sequence[Sequence[int]], timeout_s: float) -> dist.ProcessGroup | None:
        """Create each group of several ranks, and return this rank's group, if it has one. All ranks call this."""
        several, timeout = [list(ranks) for ranks in groups if len(ranks) > 1], timedelta(seconds=timeout_s)
        mine: Any = dist.new_subgroups_by_enumeration(several, timeout)[0] if several else None
        return mine


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    size = dist.get_world_size(group)
    received = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(received, tensor.contiguous(), group=group)
    return received
