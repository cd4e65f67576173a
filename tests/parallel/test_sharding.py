"""Replicas that share parameters, gradients and optimizer state train as one process does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Layout, Recipe, parallel_section, weights_of
from cells import RECIPES
from probes import bytes_of_state, gathers, gradients_after_an_evaluation, losses_of_optimizers
from torch import nn

from common.errors import PlanError
from models.gpt2 import gpt2
from parallel.plan import check_shardable, make_plan

TOLERANCE = 1e-5
TOY, GPT2 = RECIPES["toy"], RECIPES["gpt2"]

OPTIMIZERS = {
    "SGD": {"lr": 0.02, "momentum": 0.9, "nesterov": True},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "Adadelta": {"lr": 0.5},
    "RMSprop": {"lr": 0.01, "centered": True},
    "ASGD": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
    "Adagrad": {"lr": 0.05, "fused": True},
    "Adafactor": {"lr": 0.05},
    "Muon": {"lr": 0.02, "others": {"_target_": "torch.optim.AdamW", "lr": 0.01}},
}

SPLIT = ("interleaved_zero_bubble", "planned")


@pytest.mark.parametrize(
    "layout, names",
    [
        (Layout("fsdp", dp=4, chunks=2), list(OPTIMIZERS)),
        (Layout("hsdp", dp=4, chunks=2, shard=2), ["Adafactor", "Muon"]),
        (Layout("pipe_fsdp", dp=2, pp=2, chunks=4), ["Adafactor", "Muon"]),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_every_optimizer_of_torch_updates_shares_as_it_updates_whole_parameters(ranks, layout, names):
    """Four ranks share the five rows of the toy's last layer: one of them has none."""
    recipe = Recipe("toy", global_batch=24, lr=0.0, steps=5)
    sections = {name: {"_target_": f"torch.optim.{name}", **OPTIMIZERS[name]} for name in names}
    (wanted,) = ranks.run(1, losses_of_optimizers, recipe, Layout("single"), sections)
    for losses in ranks.run(layout.ranks, losses_of_optimizers, recipe, layout, sections):
        for name in sections:
            assert losses[name] == pytest.approx(wanted[name], rel=TOLERANCE), name


@pytest.mark.parametrize(
    "layout",
    [
        Layout("fsdp", dp=2, chunks=4),
        Layout("fsdp", dp=2, chunks=4, reshard=False),
        Layout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule="interleaved_zero_bubble"),
    ],
    ids=str,
)
def test_the_first_bf16_step_is_as_exact_as_in_float32(trained, layout):
    """A cast that autocast keeps from the first micro-batch would get its gradient after its layer was reduced."""
    recipe = dataclasses.replace(GPT2, precision="bf16", steps=1, eval_every=1)
    (reference,) = trained(layout.same_cut, recipe)
    run = trained(layout, recipe)
    assert run[0].losses == pytest.approx(reference.losses, rel=TOLERANCE)
    assert run[0].norms == pytest.approx(reference.norms, rel=TOLERANCE)
    assert all(tensor.dtype == reference.state[name].dtype for name, tensor in weights_of(run).items())


@pytest.mark.parametrize(
    "layout", [Layout("fsdp", dp=2, chunks=4, reshard=False), Layout("pipe_fsdp", dp=2, pp=2, chunks=4)], ids=str
)
def test_the_gradients_of_the_step_after_an_evaluation_are_those_of_a_step_without_one(ranks, layout):
    plain = ranks.run(layout.ranks, gradients_after_an_evaluation, GPT2, layout, False)
    evaluated = ranks.run(layout.ranks, gradients_after_an_evaluation, GPT2, layout, True)
    assert evaluated == plain


def test_parameters_that_stay_whole_are_gathered_once_per_step(ranks):
    """The toy has two layers with weights, each a group of its own."""
    counts = ranks.run(2, gathers, TOY, Layout("fsdp", dp=2, chunks=4, reshard=False))
    assert counts == [{"train": 2, "evaluate": 2}] * 2


@pytest.mark.parametrize("dp, shard", [(4, None), (4, 2)])
def test_a_rank_holds_its_share_of_weights_gradients_and_optimizer_state(ranks, dp, shard):
    (whole,) = ranks.run(1, bytes_of_state, GPT2, Layout("single", chunks=4))
    layout = Layout("hsdp" if shard else "fsdp", dp=dp, chunks=1, shard=shard)
    for share in ranks.run(dp, bytes_of_state, GPT2, layout):
        for kind, size in share.items():
            assert size == pytest.approx(whole[kind] / (shard or dp), rel=0.1), kind


def planned(layout, nodes=1, global_batch=16):
    return make_plan(
        parallel_section(layout),
        gpt2(size="tiny", n_layer=4),
        global_batch_size=global_batch,
        device="cpu",
        precision="fp32",
        nodes=nodes,
    )


def refused(layout, nodes=1, global_batch=16):
    with pytest.raises(PlanError) as refusal:
        planned(layout, nodes, global_batch)
    return str(refusal.value)


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_split_backward_whose_layers_are_whole_one_at_a_time_is_refused(schedule):
    layout = Layout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule=schedule, reshard=True)
    assert f"parallel.reshard=true with parallel.schedule={schedule} is refused" in refused(layout)


@pytest.mark.parametrize(
    "layout, nodes, words",
    [
        (Layout("hsdp", dp=4, shard=3), 1, "parallel.shard=3 does not divide parallel.dp=4 replicas into equal groups; "
                                           "groups can have 2, 4"),
        (Layout("hsdp", dp=4), 4, "shares nothing (each of 4 nodes has one); set parallel.shard=4"),
        (Layout("hsdp", dp=6), 4, "the 6 replicas do not lie on 4 nodes in equal groups; set parallel.shard"),
        (Layout("fsdp", dp=4, shard=1), 1, "shares nothing (parallel.shard=1); set parallel.shard=4"),
        (Layout("ddp", dp=4, shard=2), 1, "parallel.shard=2 is the size of the groups of parallel=fsdp or"),
        (Layout("ddp", dp=4, reshard=True), 1, "parallel.reshard=true is for parallel=fsdp or"),
        (Layout("fsdp", dp=4, comm_hook="bf16"), 1, "parallel.comm_hook=bf16 is for replicas with parameters of"),
        (Layout("fsdp", dp=4, comm_hook="hierarchical"), 1, "parallel=hsdp reduces gradients that way by itself"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_are_refused_with_the_numbers(layout, nodes, words):
    assert words in refused(layout, nodes, global_batch=12)


@pytest.mark.parametrize(
    "layout, nodes, group",
    [
        (Layout("fsdp", dp=4), 2, 4),
        (Layout("hsdp", dp=4), 1, 4),
        (Layout("hsdp", dp=4), 2, 2),
        (Layout("pipe_fsdp", dp=4, pp=2), 2, 4),
        (Layout("ddp", dp=4, comm_hook="hierarchical"), 2, 2),
        (Layout("pipe_ddp", dp=4, pp=2, comm_hook="hierarchical"), 2, 2),  # two pipelines on each node
        (Layout("pipe_ddp", dp=4, pp=2, order="pp_dp", comm_hook="hierarchical"), 2, 4),  # a node for each stage
        (Layout("ddp", dp=4), 2, 1),
    ],
    ids=str,
)
def test_groups_are_all_replicas_or_those_of_a_node(layout, nodes, group):
    assert planned(layout, nodes).group == group


def test_a_parameter_without_rows_is_refused_by_name():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

    with pytest.raises(PlanError, match="parallel=fsdp shares the rows of each parameter, and factor is a single"):
        check_shardable("fsdp", Scale())
