"""The part of a tensor that a rank holds: the whole tensor, or its part along one or more axes of the mesh.

A parameter, its gradient, its optimizer state and its copy in a checkpoint are one ``Piece`` each. A piece is made from
the tensor's ``parallel.placement``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import EllipsisType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parallel.dtensor import local
from parallel.mesh import Mesh
from parallel.placement import Placement

Box = slice | tuple[slice, ...] | EllipsisType  # rows, a range in each dimension, or the whole tensor


class Boxes(Protocol):
    """A source of boxes: a tensor, or a reader of a tensor in a file."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        ...

    def __getitem__(self, box: Box, /) -> Tensor: ...


class Piece(NamedTuple):
    """The part of a tensor that this rank holds.

    Attributes:
        tensor: The numbers of the part, in the memory of the original tensor.
        ranges: The part's indices in the whole tensor, in each dimension, in order.
        shape: The shape of the whole tensor.
        axes: The axes of the mesh that divide the tensor; empty if this rank holds the whole tensor.
    """

    tensor: Tensor
    ranges: tuple[tuple[slice, ...], ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...] = ()

    @classmethod
    def of_whole(cls, tensor: Tensor) -> Piece:
        """Return the piece of a rank that holds the whole tensor."""
        return cls(tensor, tuple((slice(0, size),) for size in tensor.shape), tuple(tensor.shape))

    def boxes(self) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """Yield each contiguous box: its numbers, and its index in the whole tensor."""
        for box in product(*self.ranges):
            view = self.tensor
            for dim, held in enumerate(box):
                before = sum(r.stop - r.start for r in self.ranges[dim][: self.ranges[dim].index(held)])
                view = view.narrow(dim, before, held.stop - held.start)
            yield view, box

    def read(self, given: Boxes) -> Tensor:
        """Return the same part of another tensor of the same shape."""
        if not self.axes:
            return given[...]
        read = [given[box] for _, box in self.boxes()]
        dim = next((dim for dim, ranges in enumerate(self.ranges) if len(ranges) > 1), 0)
        return read[0] if len(read) == 1 else torch.cat(read, dim)


def piece_of(tensor: Tensor, placement: Placement, mesh: Mesh) -> Piece:
    """Return this rank's piece of a tensor with the given placement."""
    return Piece(local(tensor), placement.ranges(mesh), placement.shape, placement.axes)


@torch.no_grad()
def fill(piece: Piece, given: Boxes, name: str) -> None:
    """Copy this rank's part of ``given`` into a piece's tensor.

    Raises ValueError if ``given`` has another shape or kind of number, or if its numbers are too large for the tensor's
    dtype.
    """
    if tuple(given.shape) != piece.shape:
        raise ValueError(f"{name} has {tuple(given.shape)}, expected {piece.shape}")
    part, box = piece.tensor, piece.read(given)
    floating = part.is_floating_point()
    if box.dtype != part.dtype and not (floating and box.is_floating_point()):
        raise ValueError(f"{name} holds {box.dtype}, expected {part.dtype}")
    part.copy_(box)
    narrower = floating and torch.finfo(box.dtype).max > torch.finfo(part.dtype).max
    if narrower and not torch.equal(part.isfinite(), box.isfinite().to(part.device)):
        raise ValueError(f"{name} holds {box.dtype} numbers that are too large for {part.dtype}")
