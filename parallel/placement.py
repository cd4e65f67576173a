"""The division of a tensor over the axes of the mesh, as one value for all axes.

A parameter, its gradient, its optimizer state and its copy in a checkpoint have the same ``Placement``. A placement
states which part of the whole tensor a rank holds (``parallel.pieces``), along which axes other ranks hold the other
parts, and how to join the parts. Example: a weight [12, 4] of queries, keys and values is divided between two ranks of
tensor parallelism, and FSDP2 divides the rows of each part between two replicas::

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
        axis: The name of the axis, or the names of several axes together.
        dim: The dimension.
        sizes: The number of indices of each rank in each group, by the rank's index along the axis.
        groups: The number of equal tensors that lie side by side in the dimension. Each of these tensors is divided
            separately.
    """

    axis: str | tuple[str, ...]
    dim: int
    sizes: tuple[int, ...]
    groups: int = 1

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    @property
    def size(self) -> int:
        """The size of the dimension: the number of indices of all ranks together."""
        return self.groups * sum(self.sizes)

    def ranges(self, index: int) -> tuple[slice, ...]:
        """Return the indices of a rank, one range per group."""
        each, start = sum(self.sizes), sum(self.sizes[:index])
        starts = [group * each + start for group in range(self.groups)]
        return tuple(slice(start, start + self.sizes[index]) for start in starts)

    def part(self, whole: Tensor, index: int) -> Tensor:
        """Return a copy of a rank's part of a whole tensor."""
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
        splits: The divisions in order. Each divides the part that the divisions before it leave to a rank. The sizes of
            the first division are the same on all ranks. The sizes of a later one may depend on the rank's index along
            the earlier axes.
    """

    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()

    @classmethod
    def of(cls, part: Sequence[int], splits: Iterable[Split | None]) -> Placement:
        """Return a tensor's placement. In dimensions without splits, a rank's ``part`` has the full size."""
        shape, found = [*part], tuple(split for split in splits if split is not None)
        for split in reversed(found):
            shape[split.dim] = split.size
        return cls(tuple(shape), found)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different parts; empty if each rank has the whole tensor."""
        return tuple(axis for split in self.splits for axis in split.axes)

    def ranges(self, mesh: Mesh) -> tuple[tuple[slice, ...], ...]:
        """Return this rank's indices in the whole tensor, in each dimension."""
        ranges: list[tuple[slice, ...]] = [(slice(0, size),) for size in self.shape]
        for split in self.splits:
            within, held = ranges[split.dim], split.ranges(mesh.axis(*split.axes).index)
            ranges[split.dim] = tuple(found for part in held for found in _within(within, part))
        return tuple(ranges)

    def whole(self, part: Tensor, mesh: Mesh) -> Tensor:
        """Return the whole tensor, or ``part`` if it is whole already. The ranks along ``axes`` call this together."""
        for split in reversed(self.splits):
            part = split.gather(part, mesh.axis(*split.axes))
        return part


def _within(ranges: Sequence[slice], part: slice) -> tuple[slice, ...]:
    """Return the indices at the positions ``part`` of ``ranges``."""
    found, before, size = [], part.start, part.stop - part.start
    for held in ranges:
        start, stop = held.start + before, min(held.start + before + size, held.stop)
        if start < stop:
            found.append(slice(start, stop))
            size -= stop - start
        before = max(0, before - (held.stop - held.start))
    return tuple(found) or (slice(ranges[0].start, ranges[0].start),)
