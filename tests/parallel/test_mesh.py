"""Ranks as a grid of replicas and pipeline positions."""

from __future__ import annotations

import pytest

from parallel.mesh import Mesh


def test_replica_by_replica_puts_the_ranks_of_a_pipeline_together():
    mesh = Mesh(dp=2, pp=3, order="dp_pp")
    assert [mesh.pipeline(r) for r in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert [mesh.replicas(p) for p in range(3)] == [[0, 3], [1, 4], [2, 5]]


def test_stage_by_stage_puts_the_ranks_of_a_stage_together():
    mesh = Mesh(dp=2, pp=3, order="pp_dp")
    assert [mesh.pipeline(r) for r in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert [mesh.replicas(p) for p in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("order", ["dp_pp", "pp_dp"])
@pytest.mark.parametrize("dp, pp", [(1, 1), (2, 2), (2, 3), (4, 2), (1, 4), (3, 1)])
def test_lines_of_the_grid_partition_the_world_and_every_rank_finds_itself(order, dp, pp):
    mesh = Mesh(dp, pp, order=order)
    assert mesh.size == dp * pp
    assert sorted(rank for r in range(dp) for rank in mesh.pipeline(r)) == list(range(dp * pp))
    assert sorted(rank for p in range(pp) for rank in mesh.replicas(p)) == list(range(dp * pp))
    for rank in range(dp * pp):
        seen = Mesh(dp, pp, rank, order)
        assert seen.rank_at(seen.replica, seen.position) == rank
        assert rank in seen.pipeline(seen.replica)
        assert rank in seen.replicas(seen.position)
