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
