"""Tensors that are divided over the axes of a mesh: the parts of all ranks, and the whole that is put together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from parallel.dtensor import split_of
from parallel.mesh import COPIES, SHARDS, TENSOR, Mesh
from parallel.partition import even_split
from parallel.pieces import piece_of
from parallel.placement import Placement, Split

SHAPES = [((12, 4), 0, 3), ((12, 4), 0, 1), ((3, 10), 1, 1), ((7,), 0, 1), ((5, 2), 0, 1)]  # with a dimension, groups


def chunks(size: int, ranks: int) -> tuple[int, ...]:
    """The sizes of torch.chunk, with zeros if there are fewer chunks than ranks."""
    sizes = [len(chunk) for chunk in torch.arange(size).chunk(ranks)]
    return (*sizes, *[0] * (ranks - len(sizes)))


def placed(whole: torch.Tensor, dim: int, groups: int, mesh: Mesh, shards: int) -> tuple[torch.Tensor, Placement]:
    """A rank's part of a tensor whose layer ranks share, and whose rows then replicas."""
    split = Split(TENSOR, dim, tuple(even_split(whole.shape[dim] // groups, mesh.sizes[TENSOR])), groups)
    part = split.part(whole, mesh.index[TENSOR])
    if shards == 1:
        return part, Placement.of(part.shape, (split, None))
    rows = Split(SHARDS, 0, chunks(len(part), shards))
    part = rows.part(part, mesh.index[SHARDS])
    return part, Placement.of(part.shape, (split, rows))


@pytest.mark.parametrize("shape, dim, groups", SHAPES)
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("ranks_of_a_layer", [1, 2, 4])
def test_the_parts_of_all_ranks_are_the_whole_tensor_and_none_overlaps(shape, dim, groups, ranks_of_a_layer, shards):
    whole, seen = torch.arange(torch.Size(shape).numel()).view(shape), torch.zeros(shape, dtype=torch.int64)
    for rank in range(ranks_of_a_layer * shards):
        mesh = Mesh({SHARDS: shards, TENSOR: ranks_of_a_layer}, rank)
        part, placement = placed(whole, dim, groups, mesh, shards)
        piece = piece_of(part, placement, mesh)
        assert piece.shape == shape and piece.axes == (TENSOR, SHARDS)[: 1 + (shards > 1)]
        assert torch.equal(piece.read(whole), part)
        for numbers, box in piece.boxes():
            assert torch.equal(whole[box], numbers)
            seen[box] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("shape, dim, groups", SHAPES)
@pytest.mark.parametrize("sizes", [(1,), (2, 1), (0, 3, 1)], ids=str)
def test_the_whole_is_put_together_from_unequal_parts(shape, dim, groups, sizes):
    shape = [*shape[:dim], groups * sum(sizes), *shape[dim + 1 :]]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    split = Split(TENSOR, dim, sizes, groups)
    parts = [split.part(whole, index) for index in range(len(sizes))]
    assert [part.shape[dim] for part in parts] == [groups * size for size in sizes]
    assert split.size == whole.shape[dim]
    for part in parts:

        def all_gather(padded, part=part):
            assert torch.equal(padded[: part.numel()], part.flatten()) and not padded[part.numel() :].any()
            return [F.pad(each.flatten(), (0, len(padded) - each.numel())) for each in parts]

        assert torch.equal(split.gather(part, SimpleNamespace(all_gather=all_gather)), whole)


@pytest.mark.parametrize("rows, ranks", [(5, 4), (8, 4), (1, 3), (7, 1)])
def test_a_dtensor_of_fsdp2_is_divided_as_torch_chunk_divides(rows, ranks):
    mesh = SimpleNamespace(mesh_dim_names=(COPIES, SHARDS), shape=(2, ranks))
    dtensor = SimpleNamespace(placements=(Replicate(), Shard(0)), device_mesh=mesh, shape=torch.Size((rows, 3)))
    assert split_of(dtensor) == Split(SHARDS, 0, chunks(rows, ranks))
    dtensor.placements = (Replicate(), Replicate())
    assert split_of(dtensor) is None and split_of(torch.ones(rows, 3)) is None
