"""The part of each sequence that this process computes. Ranks that share a sequence have a part each.

Layers compute each position on its own, so they need not know of the part. Exceptions are attention
(``models.attention.attend``), layers that read positions, and dropout, whose masks are those of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class SequencePart(Protocol):
    """A part of each sequence.

    Attributes:
        length: The length of the whole sequence.
        positions: The positions of this process's tokens in the whole sequence, [t] int64, in the order of the tokens.
    """

    length: int
    positions: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attend to the keys of the whole sequence. See ``models.attention.attend``."""
        ...


_part: SequencePart | None = None  # of the process, not of a thread: torch recomputes layers in threads of autograd


def part() -> SequencePart | None:
    """Return the part of each sequence that this process computes; None for whole sequences."""
    return _part


@contextmanager
def computing_part(new: SequencePart | None) -> Iterator[None]:
    """Set the part of each sequence that this process computes inside the block."""
    global _part
    before, _part = _part, new
    try:
        yield
    finally:
        _part = before


def positions(length: int, device: torch.device) -> Tensor:
    """Return the positions of the ``length`` tokens of a layer's input in the whole sequence, [length] int64."""
    return torch.arange(length, device=device) if _part is None else _part.positions.to(device)
