"""The part of a tensor that a rank holds: all of it, or what is left where axes of the mesh cut it.

A parameter, its gradient, its optimizer state and its copy in a checkpoint are one ``Piece`` each. Replicas that share
a tensor (``parallel.sharding``) cut its first dimension; ranks that share a layer (``parallel.tensor``), any one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from parallel.mesh import SHARDS, TENSOR, Mesh
from parallel.partition import even_split

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Box = slice | tuple[slice, ...] | EllipsisType  # rows, a range in each dimension, or the whole tensor


class Boxes(Protocol):
    """A tensor, or a reader of a tensor in a file, from which boxes can be taken."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        ...

    def __getitem__(self, box: Box, /) -> Tensor: ...


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut among the ranks along the axis ``tensor``.

    Attributes:
        shape: The shape of the whole tensor.
        dim: The dimension that is cut.
        groups: How many equal tensors lie side by side in that dimension. Each is cut by itself.
        ranks: The number of ranks. Where they do not divide a tensor equally, the first ones have one index more.
    """

    shape: torch.Size
    dim: int
    groups: int
    ranks: int

    def runs(self, index: int) -> tuple[slice, ...]:
        """Return the indices that a rank has in the dimension that is cut."""
        each = self.shape[self.dim] // self.groups
        sizes = even_split(each, self.ranks)
        start, stop = sum(sizes[:index]), sum(sizes[: index + 1])
        return tuple(slice(group * each + start, group * each + stop) for group in range(self.groups))

    def shape_of(self, index: int) -> torch.Size:
        """Return the shape of what a rank has."""
        size = sum(run.stop - run.start for run in self.runs(index))
        return torch.Size([*self.shape[: self.dim], size, *self.shape[self.dim + 1 :]])

    def part(self, whole: Tensor, index: int) -> Tensor:
        """Return what a rank has of a whole tensor, in memory of its own."""
        return torch.cat(
            [whole.narrow(self.dim, run.start, run.stop - run.start) for run in self.runs(index)], self.dim
        )


class Piece(NamedTuple):
    """The part of a tensor that this rank holds.

    Attributes:
        tensor: Its numbers, which share the memory of the original.
        runs: The indices of the whole tensor that it consists of, in each dimension, in order.
        shape: The shape of the whole tensor.
        axes: The axes of the mesh that cut the tensor; empty if this rank holds the whole tensor.
    """

    tensor: Tensor
    runs: tuple[tuple[slice, ...], ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...] = ()

    def boxes(self) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """Yield each contiguous box: its numbers, and its place as an index of the whole tensor."""
        for box in product(*self.runs):
            view = self.tensor
            for dim, run in enumerate(box):
                before = sum(r.stop - r.start for r in self.runs[dim][: self.runs[dim].index(run)])
                view = view.narrow(dim, before, run.stop - run.start)
            yield view, box

    def counts(self, mesh: Mesh) -> bool:
        """Return whether this rank counts and saves the box. Other ranks that hold the same box do not."""
        return mesh.counts(self.axes)

    def read(self, given: Boxes) -> Tensor:
        """Return these parts of another tensor of the same shape."""
        if not self.axes:
            return given[...]
        read = [given[box] for _, box in self.boxes()]
        cut = next((dim for dim, runs in enumerate(self.runs) if len(runs) > 1), 0)
        return read[0] if len(read) == 1 else torch.cat(read, cut)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, with the same memory. A tensor that is not shared is returned as it is."""
    return tensor.to_local() if is_shared(tensor) else tensor


def piece_of(tensor: Tensor, cut: Cut | None = None, index: int = 0) -> Piece:
    """Return which part of a tensor this rank holds.

    Args:
        tensor: A parameter or a tensor of its shape, which may be shared among replicas.
        cut: How the ranks along ``tensor`` have cut it; None if each has the whole.
        index: This rank's place among those.
    """
    shape = tensor.shape if cut is None else cut.shape
    runs = [cut.runs(index) if cut is not None and dim == cut.dim else (slice(0, n),) for dim, n in enumerate(shape)]
    size, axes = list(tensor.shape), [] if cut is None else [TENSOR]
    if is_shared(tensor):
        mesh = tensor.device_mesh
        names, here = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
        for axis, ranks, place, placement in zip(names, mesh.shape, here, tensor.placements, strict=True):
            if placement.is_shard():
                dim = placement.dim  # pyright: ignore[reportAttributeAccessIssue]  # is_shard() has checked it
                each = -(-size[dim] // ranks)  # as torch.chunk cuts
                before = min(each * place, size[dim])
                size[dim] = min(each, size[dim] - before)
                runs[dim] = _within(runs[dim], before, size[dim])
                axes.append(axis)
    return Piece(local(tensor), tuple(runs), tuple(shape), tuple(axes))


def _within(runs: Sequence[slice], before: int, size: int) -> tuple[slice, ...]:
    """Return ``size`` of the indices in ``runs``, those after the first ``before``."""
    found = []
    for run in runs:
        start, stop = run.start + before, min(run.start + before + size, run.stop)
        if start < stop:
            found.append(slice(start, stop))
            size -= stop - start
        before = max(0, before - (run.stop - run.start))
    return tuple(found) or (slice(runs[0].start, runs[0].start),)


@torch.no_grad()
def fill(piece: Piece, given: Boxes, name: str) -> None:
    """Copy this rank's part of ``given`` into a tensor.

    Raises ValueError if ``given`` has another shape or kind of number, or numbers too large for the tensor's dtype.
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


def whole(tensor: Tensor, mesh: Mesh, cut: Cut | None = None) -> Tensor:
    """Return the whole tensor, or a copy if it is cut. All ranks along the axes that cut it call this.

    ``full_tensor`` is not used, because DTensor keeps the process groups of an earlier run in the same process.
    """
    part = local(tensor)
    if SHARDS in piece_of(tensor).axes:
        line, rows = mesh.axis(SHARDS), tensor.shape[0]
        padded = part.new_zeros(-(-rows // line.size), *part.shape[1:])
        padded[: len(part)] = part
        part = torch.cat(line.all_gather(padded))[:rows]
    if cut is not None:
        line, assembled = mesh.axis(TENSOR), part.new_empty(cut.shape)
        shapes = [cut.shape_of(index) for index in range(line.size)]
        padded = part.new_zeros(max(shape.numel() for shape in shapes))
        padded[: part.numel()] = part.flatten()
        for index, (shape, theirs) in enumerate(zip(shapes, line.all_gather(padded), strict=True)):
            held = theirs[: shape.numel()].view(shape)
            for view, box in piece_of(held, cut, index).boxes():
                assembled[box] = view
        part = assembled
    return part


def shared_like(like: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that is shared as ``like`` is, and of which this rank holds ``part``."""
    if not is_shared(like):
        return part
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_shared(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether replicas share a tensor."""
    return hasattr(tensor, "placements")
