"""The part of each sequence that this process computes, and the documents in it.

Ranks that share a sequence have a part each. A sequence can be several documents side by side (``data.packing``).

Layers compute each position on its own, so they need not know of these. Exceptions are attention
(``models.attention.attend``), layers that read positions, and dropout, whose masks are those of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

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
_documents: Tensor | Literal[False] | None = False  # false outside of layers
_of_seed: dict[int, Tensor] = {}  # by the seed of the host's generator, which a layer's own recomputation restores


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


def documents() -> Tensor | None:
    """Return, for each token of a layer's input, where its document begins in the sequence, [b, t] int64.

    The result is None if each sequence is one document.
    """
    if _documents is False:
        return _of_seed.get(torch.default_generator.initial_seed()) if _of_seed else None
    return _documents


@contextmanager
def computing_documents(new: Tensor | None, seed: int | None = None) -> Iterator[None]:
    """Set the documents of a layer's input inside the block. The backward finds them by the seed, until ``forget``."""
    global _documents
    before, _documents = _documents, new
    if new is not None and seed is not None:
        _of_seed[seed] = new
    try:
        yield
    finally:
        _documents = before


def forget() -> None:
    """Forget the documents that ``computing_documents`` has set. Called after the backward."""
    _of_seed.clear()


def positions(length: int, device: torch.device) -> Tensor:
    """Return the positions of the ``length`` tokens of a layer's input in the whole sequence, [length] int64.

    If sequences have several documents, return the positions in these, [b, length].
    """
    places = torch.arange(length, device=device) if _part is None else _part.positions.to(device)
    return places if (begins := documents()) is None else places - begins.to(device)
