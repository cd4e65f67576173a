"""Ranks as a grid of replicas and pipeline positions."""

from __future__ import annotations

import pytest
from probes import sums_over_groups, which_groups

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


@pytest.mark.parametrize("order", ["dp_pp", "pp_dp"])
def test_groups_reach_exactly_the_ranks_of_the_line(ranks, order):
    mesh = Mesh(2, 2, order=order)
    for rank, (pipeline, replicas) in enumerate(ranks.run(4, sums_over_groups, order)):
        replica, position = mesh.coordinates(rank)
        assert pipeline == sum(10**r for r in mesh.pipeline(replica))
        assert replicas == sum(10**r for r in mesh.replicas(position))


def test_a_line_of_one_rank_needs_no_group(ranks):
    assert ranks.run(2, which_groups, 1, 2) == [(True, False)] * 2
    assert ranks.run(2, which_groups, 2, 1) == [(False, True)] * 2
