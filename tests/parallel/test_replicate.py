"""What replicas send each other."""

from __future__ import annotations

import dataclasses

import pytest
from cases import Layout, Recipe
from comparing import assert_same_training

GPT2 = Recipe("gpt2", global_batch=16, lr=0.2, clip=0.25, steps=6)
LAYOUTS = [Layout("ddp", dp=2, chunks=2), Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="1f1b")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("hook, tolerance", [("bf16", 2e-2), ("fp16", 2e-3)])
def test_compressed_gradients_train_alike_but_for_their_rounding(trained, layout, hook, tolerance):
    (reference,) = trained(Layout("single", chunks=4), GPT2)
    run = trained(dataclasses.replace(layout, comm_hook=hook), GPT2)
    assert_same_training(run, reference, tolerance)
    with pytest.raises(AssertionError, match="farther than"):  # they were compressed indeed
        assert_same_training(run, reference, 1e-6)


HIERARCHICAL = [
    Layout("ddp", dp=4, chunks=1, shard=2),
    Layout("ddp", dp=2, chunks=2),  # one node: there is nothing between nodes
    Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="planned"),
]


@pytest.mark.parametrize("layout", HIERARCHICAL, ids=str)
def test_gradients_that_are_reduced_in_groups_first_are_the_same(trained, layout):
    (reference,) = trained(Layout("single", chunks=4), GPT2)
    run = trained(dataclasses.replace(layout, comm_hook="hierarchical"), GPT2)
    assert_same_training(run, reference, 1e-5)


@pytest.mark.parametrize("group", [2, 1])  # with one replica in a group, all that is sent is sent between groups
def test_only_what_is_sent_between_groups_is_rounded(trained, group):
    (reference,) = trained(Layout("single", chunks=4), GPT2)
    run = trained(Layout("ddp", dp=4, chunks=1, shard=group, comm_hook="hierarchical_bf16"), GPT2)
    assert_same_training(run, reference, 2e-2)
    with pytest.raises(AssertionError, match="farther than"):
        assert_same_training(run, reference, 1e-6)


@pytest.mark.parametrize("hook", ["none", "bf16"])
def test_a_split_backward_sends_its_gradients_in_small_buckets_all_the_same(trained, hook):
    recipe = dataclasses.replace(GPT2, bucket_mb=0.05)
    (reference,) = trained(Layout("single", chunks=4), GPT2)
    layout = Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="interleaved_zero_bubble", comm_hook=hook)
    assert_same_training(trained(layout, recipe), reference, 1e-5 if hook == "none" else 2e-2)
