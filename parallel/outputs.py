"""What the last layer returns in an evaluation: whole, in the order of the data, on rank 0, in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from models.chain import Tensors
from parallel.mesh import Mesh
from parallel.plan import Plan


class Taker(Protocol):
    """Gets what the last layer returns in an evaluation. All ranks of a run have one.

    Attributes:
        alone: Whether the loss is not needed, so that it is not computed.
    """

    alone: bool = False

    def select(self, outputs: tuple[Tensor, ...], targets: Tensors) -> tuple[Tensor, ...]:
        """Return what rank 0 needs of a micro-batch, by default all. A rank with the last layer calls this.

        Args:
            outputs: What the last layer has returned, [samples, ...] each, without samples that fill up a batch. If
                ranks divide sequences, these are the positions of this rank.
            targets: [samples, ...], or a tuple of such tensors, likewise.
        """
        return outputs

    def take(self, selected: tuple[Tensor, ...], targets: Tensors) -> None:
        """Take a global batch, on the CPU and in the order of the data. Rank 0 calls this.

        Args:
            selected: The results of ``select``, of all micro-batches and positions, [samples, ...] each. 16-bit floats
                have become float32.
            targets: [samples, ...], or a tuple of such tensors.
        """
        ...


def hand_out(
    mine: Sequence[Tensor], plan: Plan, mesh: Mesh, device: torch.device, taker: Taker, several: int | None = None
) -> None:
    """Send what was selected of a global batch to rank 0, for its ``taker``. All ranks call this together.

    Args:
        mine: What was selected of the batch of this rank's replica, and the targets; empty without the last layer.
        plan: The layout.
        mesh: The ranks.
        device: The device of this rank.
        taker: The taker of this rank.
        several: The number of targets of a sample; None if they are one tensor.
    """
    last = next(p for p in range(plan.pp) if plan.stages[-1] in plan.stages_of(p))
    owners = [mesh.pipeline(replica)[last if plan.pipelined else 0] for replica in range(mesh.dp)]
    shapes = mesh.gather([[str(x.dtype).removeprefix("torch."), *x.shape] for x in mine])
    received = []
    for owner in owners:
        tensors = mine
        if mesh.rank == 0 < owner:
            tensors = [torch.empty(shape, dtype=getattr(torch, kind), device=device) for kind, *shape in shapes[owner]]
        for x in tensors if owner > 0 and mesh.rank in (0, owner) else ():
            if x.numel():
                dist.recv(x, owner) if mesh.rank == 0 else dist.send(x.contiguous(), 0)
        if mesh.rank == 0:
            received.append([(x.float() if x.is_floating_point() and x.itemsize < 4 else x).cpu() for x in tensors])
    if mesh.rank == 0:
        whole = tuple(map(torch.cat, zip(*received, strict=True)))
        first = len(whole) - (several or 1)
        taker.take(whole[:first], whole[first] if several is None else whole[first:])
