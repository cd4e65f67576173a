"""How a tensor is divided over the axes of the mesh, as one value for every axis.

A parameter, its gradient, its optimizer state and its copy in a checkpoint have the same ``Placement``. It says which
part of the whole tensor a rank holds (``parallel.pieces``), along which axes other ranks hold the other parts, and how
the parts are put together. A weight [12, 4] of queries, keys and values, divided between two ranks of tensor
parallelism, and the rows of each divided again by FSDP2 between two replicas::

    Placement((12, 4), (Split(TENSOR, dim=0, sizes=(2, 2), groups=3), Split(SHARDS, dim=0, sizes=(3, 3))))

    rows        0 1 2 3 | 4 5 6 7 | 8 9 10 11    three groups side by side
    tensor 0    0 1       4 5       8 9          shard 0: 0 1 4    shard 1: 5 8 9
    tensor 1        2 3       6 7       10 11    shard 0: 2 3 6    shard 1: 7 10 11
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.mesh import Mesh, Ranks


@dataclass(frozen=True)
class Split:
    """The division of a tensor's dimension among the ranks along an axis of the mesh.

    Attributes:
        axis: The name of the axis.
        dim: The dimension.
        sizes: The number of indices in each group that each rank has, by its index along the axis.
        groups: The number of equal tensors that lie side by side in the dimension. Each is divided by itself.
    """

    axis: str
    dim: int
    sizes: tuple[int, ...]
    groups: int = 1

    @property
    def size(self) -> int:
        """The number of indices of all ranks together."""
        return self.groups * sum(self.sizes)

    def ranges(self, index: int) -> tuple[slice, ...]:
        """Return the indices that a rank has, those of each group."""
        each, start = sum(self.sizes), sum(self.sizes[:index])
        starts = [group * each + start for group in range(self.groups)]
        return tuple(slice(start, start + self.sizes[index]) for start in starts)

    def part(self, whole: Tensor, index: int) -> Tensor:
        """Return a rank's part of a whole tensor, with its own memory."""
        parts = [whole.narrow(self.dim, held.start, held.stop - held.start) for held in self.ranges(index)]
        return torch.cat(parts, self.dim)

    def gather(self, part: Tensor, axis: Ranks) -> Tensor:
        """Return the whole tensor. The ranks along ``axis`` call this together, each with its part."""
        before, after = part.shape[: self.dim], part.shape[self.dim + 1 :]
        shapes = [(*before, self.groups, size, *after) for size in self.sizes]
        padded = part.new_zeros(max(map(math.prod, shapes)))
        padded[: part.numel()] = part.flatten()
        parts = [sent[: math.prod(s)].view(s) for sent, s in zip(axis.all_gather(padded), shapes, strict=True)]
        return torch.cat(parts, self.dim + 1).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class Placement:
    """The division of a tensor over the axes of the mesh.

    Attributes:
        shape: The shape of the whole tensor.
        splits: The divisions in their order: each divides what a rank has after those before it. The sizes of the first
            one are the same on all ranks, those of the next may depend on the rank's index along the axes before.
    """

    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()

    @classmethod
    def of(cls, part: Sequence[int], splits: Iterable[Split | None]) -> Placement:
        """Return a tensor's placement. In dimensions without splits, the shape of a rank's ``part`` is the whole's."""
        shape, found = [*part], tuple(split for split in splits if split is not None)
        for split in reversed(found):
            shape[split.dim] = split.size
        return cls(tuple(shape), found)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different parts; empty if each rank has the whole tensor."""
        return tuple(split.axis for split in self.splits)

    def ranges(self, mesh: Mesh) -> tuple[tuple[slice, ...], ...]:
        """Return the indices of the whole tensor that this rank has, in each dimension."""
        ranges: list[tuple[slice, ...]] = [(slice(0, size),) for size in self.shape]
        for split in self.splits:
            within, held = ranges[split.dim], split.ranges(mesh.axis(split.axis).index)
            ranges[split.dim] = tuple(found for part in held for found in _within(within, part))
        return tuple(ranges)

    def whole(self, part: Tensor, mesh: Mesh) -> Tensor:
        """Return the whole tensor, or ``part`` if that is the whole. The ranks along ``axes`` call this together."""
        for split in reversed(self.splits):
            part = split.gather(part, mesh.axis(split.axis))
        return part


def _within(ranges: Sequence[slice], part: slice) -> tuple[slice, ...]:
    """Return the indices in ``ranges`` that have the places ``part`` there."""
    found, before, size = [], part.start, part.stop - part.start
    for held in ranges:
        start, stop = held.start + before, min(held.start + before + size, held.stop)
        if start < stop:
            found.append(slice(start, stop))
            size -= stop - start
        before = max(0, before - (held.stop - held.start))
    return tuple(found) or (slice(ranges[0].start, ranges[0].start),)
