"""No rank holds a layer that it does not run."""

from __future__ import annotations

import pytest
from cases import Layout, Recipe
from small_models import VOCABULARY, chain_and_batches

RECIPE = Recipe("gpt2", global_batch=8, lr=0.1, steps=1)
LAYOUTS = [
    Layout("pipelined", pp=2, chunks=2),
    Layout("pipelined", pp=4, chunks=4, schedule="1f1b"),
    Layout("pipelined", pp=2, chunks=2, schedule="interleaved_1f1b"),
    Layout("pipelined", pp=2, chunks=2, balance="size"),
    Layout("pipe_ddp", dp=2, pp=2, chunks=2),
    Layout("pipe_ddp", dp=2, pp=2, chunks=2, order="pp_dp"),
]


def replicas(layout: Layout, run: list) -> list[list]:
    if layout.order == "pp_dp":
        return [run[replica :: layout.dp] for replica in range(layout.dp)]
    return [run[replica * layout.pp : (replica + 1) * layout.pp] for replica in range(layout.dp)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_of_a_replica_hold_every_layer_once_and_one_more_copy_of_the_tied_weight(trained, layout):
    chain, _ = chain_and_batches(RECIPE)
    model = sum(p.numel() for p in chain.skeleton().parameters())
    tied = VOCABULARY * 64
    for replica in replicas(layout, trained(layout, RECIPE)):
        assert sum(result.parameters for result in replica) == model + tied
        assert all(result.parameters < model for result in replica)
        assert sorted(name for result in replica for name in result.layers) == sorted(chain.names)
        for result in replica:
            assert all(name.startswith(tuple(f"{layer}." for layer in result.layers)) for name in result.state)
        saved = [name for result in replica for name in result.state]
        assert sorted(saved) == sorted(name for name, _ in chain.skeleton().named_parameters())


def test_model_parallel_and_ddp_hold_the_whole_model_once_and_a_tied_copy_where_it_is_cut(trained):
    chain, _ = chain_and_batches(RECIPE)
    model = sum(p.numel() for p in chain.skeleton().parameters())
    assert [r.parameters for r in trained(Layout("ddp", dp=2, chunks=2), RECIPE)] == [model, model]
    assert trained(Layout("model_parallel", pp=2, chunks=2), RECIPE)[0].parameters == model + VOCABULARY * 64
