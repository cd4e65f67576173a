"""Ranks as a grid of replicas and pipeline positions, and the process groups along its lines.

With parallel.order=dp_pp (rank = replica x pp + position) for dp=2, pp=2:

                 position 0   position 1
    replica 0      rank 0       rank 1      <- a pipeline: neighbours exchange activations
    replica 1      rank 2       rank 3
                     ^- ranks 0 and 2 hold the same stages and average their gradients

parallel.order=pp_dp numbers down the columns instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass
class Mesh:
    """``rank`` is this process's; groups are made by ``connect`` and None until then, or where they have one member."""

    dp: int
    pp: int
    rank: int = 0
    order: str = "dp_pp"
    dp_group: dist.ProcessGroup | None = field(default=None, repr=False)
    pp_group: dist.ProcessGroup | None = field(default=None, repr=False)

    def rank_at(self, replica: int, position: int) -> int:
        """The rank that runs ``position`` of pipeline ``replica``."""
        return replica * self.pp + position if self.order == "dp_pp" else position * self.dp + replica

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(replica, position) of a rank."""
        return divmod(rank, self.pp) if self.order == "dp_pp" else divmod(rank, self.dp)[::-1]

    @property
    def size(self) -> int:
        return self.dp * self.pp

    @property
    def replica(self) -> int:
        return self.coordinates(self.rank)[0]

    @property
    def position(self) -> int:
        return self.coordinates(self.rank)[1]

    def pipeline(self, replica: int) -> list[int]:
        """Ranks of one pipeline, first stage to last."""
        return [self.rank_at(replica, position) for position in range(self.pp)]

    def replicas(self, position: int) -> list[int]:
        """Ranks that hold the same stages."""
        return [self.rank_at(replica, position) for replica in range(self.dp)]

    def connect(self, timeout_s: float) -> Mesh:
        """Make the process groups. Every rank calls it; needs an initialised default group if size > 1."""
        self.pp_group = self.new_group([self.pipeline(r) for r in range(self.dp)], timeout_s)
        self.dp_group = self.new_group([self.replicas(p) for p in range(self.pp)], timeout_s)
        return self

    def gather(self, value: Any) -> list:
        """Everyone's value, by rank. All ranks call it together."""
        if self.size == 1:
            return [value]
        answers: list = [None] * self.size
        dist.all_gather_object(answers, value)
        return answers

    def new_group(self, lines: Sequence[Sequence[int]], timeout_s: float) -> dist.ProcessGroup | None:
        """Make one group for each line of ranks (all ranks take part); returns the one this rank is in."""
        mine = None
        for ranks in lines:
            if len(ranks) < 2:
                continue
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
            if self.rank in ranks:
                mine = group
        return mine
