"""Replicas that share parameters, gradients and optimizer state train as one process does."""

import pytest
from cases import Layout, Recipe, assert_same_training, train
from cells import RECIPES
from probes import bytes_of_state, gathers, gradients_after_an_evaluation, losses_of_optimizers
from ranks import Ranks

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


@pytest.mark.parametrize(
    "layout, names",
    [
        pytest.param(Layout("fsdp", dp=4), list(OPTIMIZERS), marks=pytest.mark.slow),
        pytest.param(Layout("hsdp", dp=4, chunks=2, shard=2), ["Adafactor", "Muon"], marks=pytest.mark.slow),
        (Layout("pipe_fsdp", dp=2, pp=2, chunks=4), ["Adafactor", "Muon"]),
    ],
    ids=lambda value: value.strategy if isinstance(value, Layout) else "",
)
def test_every_optimizer_of_torch_updates_shares_as_it_updates_whole_parameters(ranks, layout, names):
    """Four ranks share the five rows of the toy's last layer: one of them has none."""
    recipe = Recipe("toy", global_batch=24, lr=0.0, steps=5)
    sections = {name: {"_target_": f"torch.optim.{name}", **OPTIMIZERS[name]} for name in names}
    (wanted,) = ranks.run(1, losses_of_optimizers, recipe, Layout("single"), sections)
    for losses in ranks.run(layout.processes, losses_of_optimizers, recipe, layout, sections):
        for name in sections:
            assert losses[name] == pytest.approx(wanted[name], rel=TOLERANCE), name


@pytest.mark.parametrize(
    "layout",
    [
        Layout("fsdp", dp=2, chunks=4, reshard=False),
        pytest.param(Layout("pipe_fsdp", dp=2, pp=2, chunks=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_gradients_of_the_step_after_an_evaluation_are_those_of_a_step_without_one(ranks, layout):
    plain = ranks.run(layout.processes, gradients_after_an_evaluation, GPT2, layout, False)
    evaluated = ranks.run(layout.processes, gradients_after_an_evaluation, GPT2, layout, True)
    assert evaluated == plain


def test_parameters_that_stay_whole_are_gathered_once_per_step(ranks):
    """The toy has two layers with weights, each a group of its own."""
    counts = ranks.run(2, gathers, TOY, Layout("fsdp", dp=2, chunks=4, reshard=False))
    assert counts == [{"train": 2, "evaluate": 2}] * 2


@pytest.mark.parametrize("dp, shard", [(4, None), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_rank_holds_its_share_of_weights_gradients_and_optimizer_state(ranks, dp, shard):
    (whole,) = ranks.run(1, bytes_of_state, GPT2, Layout("single", chunks=4))
    layout = Layout("hsdp" if shard else "fsdp", dp=dp, chunks=1, shard=shard)
    for share in ranks.run(dp, bytes_of_state, GPT2, layout):
        for kind, size in share.items():
            assert size == pytest.approx(whole[kind] / (shard or dp), rel=0.1), kind


def test_ranks_that_share_a_gpu_share_parameters(ranks):
    """Here on CPUs, through the process group of such ranks."""
    pool = Ranks(2, {}, "host")
    try:
        run = pool.run(2, train, Layout("fsdp", dp=2), TOY)
    finally:
        pool.close()
    (reference,) = ranks.run(1, train, Layout("single"), TOY)
    assert_same_training(run, reference, TOLERANCE)
