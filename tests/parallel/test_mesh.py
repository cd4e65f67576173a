"""Ranks as a mesh of named axes, and the groups along them."""

import itertools
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from cases import Layout, Recipe, build
from probes import gathered_along
from small_models import chain_and_batches

from common.errors import LaunchError
from parallel import mesh as mesh_module
from parallel.mesh import COPIES, EXPERTS, PEERS, PIPELINE, REPLICAS, SHARDS, TENSOR, Mesh
from parallel.strategy import build_strategy


@pytest.mark.parametrize(
    "order, pipelines, replicas",
    [
        ("dp_pp", [[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]),
        ("pp_dp", [[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_the_mesh_of_two_replicas_and_three_stages(order, pipelines, replicas):
    layout = Layout("pipe_ddp", dp=2, pp=3, order=order)
    mesh = layout.mesh()
    assert [mesh.pipeline(replica) for replica in range(2)] == mesh.groups(PIPELINE) == pipelines
    assert mesh.groups(*REPLICAS) == replicas
    for rank in range(6):
        seen = layout.mesh(rank)
        assert (
            seen.axis(PIPELINE).ranks == pipelines[seen.replica] and seen.axis(COPIES).ranks == replicas[seen.position]
        )


@pytest.mark.parametrize("sharded, axis, other", [(True, SHARDS, PEERS), (False, PEERS, SHARDS)])
@pytest.mark.parametrize(
    "order, together, between", [("dp_pp", [4, 6], [2, 6]), ("pp_dp", [2, 3], [1, 3])], ids=["dp_pp", "pp_dp"]
)
def test_groups_of_replicas_are_neighbours(order, together, between, sharded, axis, other):
    """Rank 6 or 3 of four replicas of two stages is the last replica's first stage."""
    strategy = "pipe_fsdp" if sharded else "pipe_ddp"
    mesh = Layout(strategy, dp=4, pp=2, order=order, shard=2).mesh(between[1])
    assert mesh.replica == 3 and mesh.position == 0
    assert mesh.axis(axis).ranks == together and mesh.axis(COPIES).ranks == between
    alone = dict.fromkeys((EXPERTS, PIPELINE, "context", TENSOR), 0)
    assert mesh.index == {COPIES: 1, axis: 1, other: 0, **alone} and mesh.dp == 4
    assert mesh.axis(SHARDS).size == (2 if sharded else 1)


def test_another_axis_is_one_more_name():
    ranks = [Mesh({COPIES: 2, PIPELINE: 2, TENSOR: 2}, rank) for rank in range(8)]
    assert ranks[5].axis(TENSOR).ranks == [4, 5] and ranks[5].axis(PIPELINE).ranks == [5, 7]
    assert ranks[5].axis("context").ranks == [5], "an axis without a name has one rank"
    assert [mesh.replica for mesh in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("sizes", [{COPIES: 2, SHARDS: 3, PIPELINE: 2, TENSOR: 2}, {PIPELINE: 2, PEERS: 4}, {}])
def test_each_part_of_a_tensor_counts_once_on_each_position(sizes):
    """However it is cut, the ranks of a position that count have each part, and none twice."""
    meshes = [Mesh(sizes, rank) for rank in range(Mesh(sizes).size)]
    others = [name for name in sizes if name != PIPELINE]
    for cut in itertools.chain.from_iterable(itertools.combinations(others, n) for n in range(len(others) + 1)):
        for position in range(sizes.get(PIPELINE, 1)):
            here = [mesh for mesh in meshes if mesh.position == position]
            counted = [mesh.axis(*cut).index for mesh in here if mesh.owns(cut)]
            assert sorted(counted) == list(range(here[0].axis(*cut).size))


@pytest.mark.parametrize("axis, counted", [(COPIES, [True, True]), (TENSOR, [True, False])])
def test_a_loss_that_several_ranks_compute_of_the_same_samples_counts_once(axis, counted):
    recipe = Recipe("toy", global_batch=4, lr=0.1)
    plan, strategy = build(Layout("single"), recipe)
    for rank in range(2):
        seen = build_strategy(plan, strategy.chain, Mesh({axis: 2}, rank), strategy.options, sample=None)
        _, samples, *_ = seen.eval_step(chain_and_batches(recipe)[1](0))
        assert bool(samples) == counted[rank]


def test_values_are_gathered_along_an_axis(ranks):
    found = ranks.run(4, gathered_along, {COPIES: 2, PIPELINE: 2})
    assert [rank[COPIES] for rank in found] == [["0", "2"], ["1", "3"], ["0", "2"], ["1", "3"]]
    assert [rank[PIPELINE] for rank in found] == [["0", "1"], ["0", "1"], ["2", "3"], ["2", "3"]]


class Command:
    """Its pickle makes a folder when it is read."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_message_that_another_program_has_replaced_ends_the_run_and_executes_nothing(monkeypatch, tmp_path):
    sent = []

    def replaced(tensor, group):
        sent.append(tensor.numpy().tobytes())
        if len(sent) == 1:  # how long the messages are
            return [tensor, torch.tensor([len(command)])]
        return [tensor, torch.frombuffer(bytearray(command), dtype=torch.uint8)]

    command = pickle.dumps(Command(tmp_path / "executed"))
    monkeypatch.setattr(mesh_module, "_all_gather", replaced)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    with pytest.raises(LaunchError, match="a message that is not JSON .* another program talks to this run's ports"):
        Mesh({COPIES: 2}, 0).gather("a text")
    assert sent[1].strip() == b'"a text"' and not (tmp_path / "executed").exists()
