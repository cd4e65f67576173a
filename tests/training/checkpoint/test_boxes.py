"""Pieces of tensors that are cut in any dimension, in files: written by several ranks, read by several others."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common.errors import CheckpointError
from parallel.mesh import COPIES, PEERS, Mesh
from parallel.pieces import Piece
from training.checkpoint.files import sha256, write_file
from training.checkpoint.init_from import _Padded, _Transposed
from training.checkpoint.load import StoredTensor
from training.checkpoint.save import describe

BOXES = {
    "whole": ({}, []),
    "rows": ({"a": 4}, [(0, "a")]),  # of 6 rows in shares of 2, the last rank has none
    "columns": ({"a": 2}, [(1, "a")]),
    "rows and columns": ({"a": 2, "b": 2}, [(0, "a"), (1, "b")]),
    "columns among replicas": ({COPIES: 2, "a": 2, PEERS: 2}, [(1, "a")]),
    "the last of three dimensions": ({"a": 2}, [(2, "a")]),
    "the first and the last": ({"a": 3, "b": 2}, [(0, "a"), (2, "b")]),
}


def cut(tensor: torch.Tensor, cuts: list, mesh: Mesh) -> Piece:
    """The piece of a rank, of a tensor whose dimensions are cut along axes of a mesh, each into equal shares."""
    piece, ranges = tensor, [(slice(0, size),) for size in tensor.shape]
    for dim, axis in cuts:
        line = mesh.axis(axis)
        share = -(-tensor.shape[dim] // line.size)
        start = min(share * line.index, tensor.shape[dim])
        ranges[dim] = (slice(start, min(start + share, tensor.shape[dim])),)
        piece = piece[(slice(None),) * dim + ranges[dim]]
    return Piece(piece, tuple(ranges), tuple(tensor.shape), tuple(axis for _, axis in cuts))


@pytest.mark.parametrize("how", BOXES)
def test_a_tensor_that_is_cut_in_any_dimension_is_in_the_file_as_if_it_were_whole(tmp_path, how):
    """Each number is written once: by the first of the ranks that hold it."""
    sizes, cuts = BOXES[how]
    whole = {"weight": torch.arange(6 * 8 * 4.0).view(6, 8, 4), "bias": torch.arange(5), "scale": torch.tensor(2.0)}
    path, written = tmp_path / "cut" / "model-00.safetensors", []
    for rank in reversed(range(Mesh(sizes).size)):
        mesh = Mesh(sizes, rank)
        pieces = {name: cut(tensor, cuts if name == "weight" else [], mesh) for name, tensor in whole.items()}
        write_file(path, pieces, mesh)
        written.append((pieces, mesh))
    write_file(tmp_path / "whole.safetensors", {name: cut(t, [], Mesh({})) for name, t in whole.items()}, Mesh({}))
    assert path.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    described = [describe(path, *one) for one in written]
    assert described[-1] == {"sha256": sha256(path), "bytes": path.stat().st_size}
    for end in (path.read_bytes()[:-1], path.read_bytes()[:-4] + b"lost"):
        path.write_bytes(end)
        with pytest.raises(CheckpointError, match="is not what its ranks have written"):
            for one in written:
                describe(path, *one)


@pytest.mark.parametrize("how", BOXES)
def test_each_rank_reads_its_box_of_a_tensor_that_was_written_in_others(tmp_path, how):
    whole, others = torch.arange(6 * 8 * 4.0).view(6, 8, 4), {"c": 3, "d": 4}
    for rank in range(12):
        mesh = Mesh(others, rank)
        write_file(tmp_path / "file", {"weight": cut(whole, [(0, "c"), (1, "d")], mesh)}, mesh)
    sizes, cuts = BOXES[how]
    for rank in range(Mesh(sizes).size):
        piece = cut(whole, cuts, Mesh(sizes, rank))
        stored = StoredTensor(safe_open(tmp_path / "file", framework="pt"), "weight")
        assert torch.equal(piece.read(stored), piece.tensor)


@pytest.mark.parametrize("cuts", [[(0, "a")], [(1, "a")], [(0, "a"), (1, "b")]], ids=str)
def test_a_matrix_that_a_file_has_transposed_or_with_fewer_rows_is_read_in_boxes_too(tmp_path, cuts):
    theirs = torch.randn(8, 6)
    save_file({"weight": theirs}, tmp_path / "file")
    stored = StoredTensor(safe_open(tmp_path / "file", framework="pt"), "weight")
    padded = torch.cat([theirs, theirs.double().mean(dim=0).float().expand(3, -1)])
    for given, whole in ((_Transposed(stored), theirs.t()), (_Padded(stored, 11), padded)):
        torch.testing.assert_close(given[...], whole)
        for rank in range(6):
            piece = cut(whole, cuts, Mesh({"a": 3, "b": 2}, rank))
            torch.testing.assert_close(piece.read(given), piece.tensor)
