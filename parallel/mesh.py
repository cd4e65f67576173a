"""Ranks as a grid of replicas and pipeline positions, and the process groups along its lines.

With parallel.order=dp_pp (rank = replica x pp + position) for dp=2, pp=2:

                 position 0   position 1
    replica 0      rank 0       rank 1      <- a pipeline: neighbours exchange activations
    replica 1      rank 2       rank 3
                     ^- ranks 0 and 2 hold the same stages and average their gradients

parallel.order=pp_dp numbers down the columns instead.

Neighbouring replicas form groups (``group`` of them). A group reduces gradients among its ranks first and then with the
other groups; where training is sharded, its ranks share one copy of the parameters. For dp=4, group=2 and one stage:

    group 0      ranks 0, 1     <- inner: reduce-scatter, and shares of one copy
    group 1      ranks 2, 3
                 ^- ranks 0 and 2 (outer): all-reduce of what each holds after the reduce-scatter
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.errors import LaunchError


@dataclass
class Mesh:
    """The grid of ranks, seen from one of them.

    Attributes:
        dp: The number of replicas.
        pp: The number of ranks of each pipeline.
        rank: This process's rank.
        order: dp_pp or pp_dp, the numbering of the ranks.
        group: How many neighbouring replicas form a group.
        sharded: Whether the ranks of a group share one copy of the parameters.
        dp_group: The ranks that hold the same stages. Like the next three None until ``connect``, or for one rank.
        pp_group: The ranks of this pipeline.
        inner_group: The ranks of ``dp_group`` in the same group of replicas.
        outer_group: The ranks of ``dp_group`` at the same place of every group.
    """

    dp: int
    pp: int
    rank: int = 0
    order: str = "dp_pp"
    group: int = 1
    sharded: bool = False
    dp_group: dist.ProcessGroup | None = field(default=None, repr=False)
    pp_group: dist.ProcessGroup | None = field(default=None, repr=False)
    inner_group: dist.ProcessGroup | None = field(default=None, repr=False)
    outer_group: dist.ProcessGroup | None = field(default=None, repr=False)

    def rank_at(self, replica: int, position: int) -> int:
        """Return the rank that runs ``position`` of pipeline ``replica``."""
        return replica * self.pp + position if self.order == "dp_pp" else position * self.dp + replica

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (replica, position) of a rank."""
        return divmod(rank, self.pp) if self.order == "dp_pp" else divmod(rank, self.dp)[::-1]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.dp * self.pp

    @property
    def replica(self) -> int:
        """The replica that this rank belongs to, from 0."""
        return self.coordinates(self.rank)[0]

    @property
    def position(self) -> int:
        """This rank's place in its pipeline, from 0."""
        return self.coordinates(self.rank)[1]

    @property
    def shards(self) -> int:
        """How many ranks share one copy of the parameters; 1 where each has its own."""
        return self.group if self.sharded else 1

    @property
    def shard(self) -> int:
        """This rank's place among those that share a copy, from 0."""
        return self.replica % self.shards

    @property
    def copy(self) -> int:
        """The copy of the parameters that this rank has, or has a share of, from 0. The first one is saved."""
        return self.replica // self.shards

    def pipeline(self, replica: int) -> list[int]:
        """Return the ranks of one pipeline, first stage to last."""
        return [self.rank_at(replica, position) for position in range(self.pp)]

    def replicas(self, position: int) -> list[int]:
        """Return the ranks that hold the same stages."""
        return [self.rank_at(replica, position) for replica in range(self.dp)]

    def connect(self, timeout_s: float) -> Mesh:
        """Make the process groups, and return this mesh. Every rank calls this."""
        self.pp_group = self.new_group([self.pipeline(r) for r in range(self.dp)], timeout_s)
        columns = [self.replicas(position) for position in range(self.pp)]
        self.dp_group = self.new_group(columns, timeout_s)
        if self.group == self.dp:
            self.inner_group = self.dp_group
        elif self.group == 1:
            self.outer_group = self.dp_group
        else:
            starts = range(0, self.dp, self.group)
            inner = [column[start : start + self.group] for column in columns for start in starts]
            self.inner_group = self.new_group(inner, timeout_s)
            outer = [column[place :: self.group] for column in columns for place in range(self.group)]
            self.outer_group = self.new_group(outer, timeout_s)
        return self

    def disconnect(self) -> None:
        """Close the process groups of ``connect``. Every rank calls this, once none uses them any more."""
        for group in {self.pp_group, self.dp_group, self.inner_group, self.outer_group} - {None}:
            dist.destroy_process_group(group)
        self.pp_group = self.dp_group = self.inner_group = self.outer_group = None

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list:
        """Return every rank's value, by rank. All ranks of ``group`` call this together (None: all ranks).

        Values travel as JSON in tensors of bytes, never as pickles: whoever can reach the ranks' connections can end
        the run, and can execute nothing. A value is made of what JSON knows; tuples come back as lists.
        """
        mine = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(mine)]
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        longest = int(max(self._gather_tensors(torch.tensor([len(mine)], device=device), group)))
        padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8).to(device)
        messages = self._gather_tensors(padded, group)
        try:  # JSON ignores the spaces behind it
            return [json.loads(message.cpu().numpy().tobytes()) for message in messages]
        except ValueError as error:
            raise LaunchError(
                f"a rank sent a message that is not JSON ({error}): the network has changed it, or another program "
                "talks to this run's ports (SECURITY.md). Start the run again"
            ) from None

    def _gather_tensors(self, mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        received = [torch.zeros_like(mine) for _ in range(self.size)]
        dist.all_gather(received, mine, group)
        return received

    def new_group(self, lines: Sequence[Sequence[int]], timeout_s: float) -> dist.ProcessGroup | None:
        """Make a group for each line of several ranks; return that of this rank, if any. All ranks call this."""
        own = None
        for ranks in lines:
            if len(ranks) < 2:
                continue
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
            if self.rank in ranks:
                own = group
        return own
