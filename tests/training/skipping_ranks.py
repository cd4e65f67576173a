"""What tests of skipped steps run on each rank: a training whose numbers are spoilt on one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from composed import run_on_rank

from parallel.strategy import Strategy


def train_spoilt(tree: dict, folder: str, meeting: str, step: int, rank: int, what: str) -> tuple[dict, dict]:
    """(summary, this rank's weights and buffers at the end) of a training in which ``rank`` gets a NaN at ``step``.

    what  "loss", "gradient" (after it was averaged over replicas: of this rank only), or "nothing"
    """
    mine = dist.get_rank() == rank if dist.is_initialized() else rank == 0
    end = {}
    with _spoilt(step, what if mine else "nothing"), _kept(end):
        summary = run_on_rank(tree, folder, meeting)
    return summary, end


@contextmanager
def _spoilt(bad: int, what: str) -> Iterator[None]:
    now, train_step, sums, agree = [0], Strategy.train_step, Strategy.take_sums, Strategy._agree

    def counted(self, batch, step, *args):
        now[0] = step
        result = train_step(self, batch, step, *args)
        now[0] = 0
        return result

    def spoil_gradient(self, *args):
        if now[0] == bad and what == "gradient":
            [p.grad for p in self.parameters() if p.grad is not None][-1].view(-1)[0] = math.nan
        return agree(self, *args)

    def spoil_loss(self):
        found = sums(self)
        if now[0] == bad and what == "loss":
            found[0] = math.nan
        return found

    Strategy.train_step, Strategy._agree, Strategy.take_sums = counted, spoil_gradient, spoil_loss
    try:
        yield
    finally:
        Strategy.train_step, Strategy._agree, Strategy.take_sums = train_step, agree, sums


@contextmanager
def _kept(end: dict) -> Iterator[None]:
    """Fill ``end`` with this rank's tensors before its strategy lets go of them."""
    close = Strategy.close

    def keep(self):
        for stage in self.stages:
            end.update({name: tensor.detach().clone() for name, tensor in stage.layers.state_dict().items()})
        close(self)

    Strategy.close = keep
    try:
        yield
    finally:
        Strategy.close = close


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
