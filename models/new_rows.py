"""Rows of an embedding for words that a vocabulary has not had so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 4096  # rows summed at a time: a float64 copy of a whole embedding would be twice its size


@torch.no_grad()
def fill_new_rows(weight: Tensor, vocab_size: int, sources: Sequence[Sequence[int] | None], known: int = 0) -> None:
    """Set the rows of an embedding from ``vocab_size`` on, in place, one for each of ``sources``.

    Means are computed in float64 on the CPU, so that copies on other ranks and devices get the same numbers.

    Args:
        weight: [rows, width].
        vocab_size: Number of rows that the vocabulary had before.
        sources: For each new word the rows below ``vocab_size`` whose mean it starts as; None: all of them.
        known: How many of the new words, the first ones, have their rows already.
    """
    everything = None
    for i, rows in enumerate(sources[known:], start=known):
        if rows is None:
            everything = _mean(weight[:vocab_size]) if everything is None else everything
            mean = everything
        else:
            mean = _mean(weight[torch.tensor(rows, device=weight.device)])
        weight[vocab_size + i] = mean.to(weight)


def _mean(rows: Tensor) -> Tensor:
    total = sum(block.cpu().double().sum(dim=0) for block in rows.split(_BLOCK))
    return total / len(rows)
