"""A weight that two stages share counts once; that its copies stay equal is seen in every cell (``weights_of``)."""

from __future__ import annotations

import math

import pytest
from cases import Layout, Recipe
from probes import clipped_norms, measured_norms, norms_of_one_step

RECIPE = Recipe("gpt2", global_batch=8, lr=0.2, steps=5, dropout=0.0)


def test_counting_the_tied_weight_twice_would_be_seen(ranks):
    """The norm of its gradient is a large part of the whole."""
    (norm, tied) = ranks.run(1, norms_of_one_step, RECIPE, Layout("single", chunks=4))[0]
    assert math.hypot(norm, tied) > 1.01 * norm


def test_the_norm_measured_again_after_the_step_is_the_step_s_own(ranks):
    for reported, again in ranks.run(4, measured_norms, RECIPE, Layout("pipe_ddp", dp=2, pp=2, chunks=2)):
        assert again == pytest.approx(reported, rel=1e-6)


def test_clipping_brings_the_whole_norm_to_the_limit_and_both_copies_down_alike(ranks):
    for norm, tied in ranks.run(2, clipped_norms, RECIPE, Layout("pipelined", pp=2, chunks=4), 0.1):
        assert norm == pytest.approx(0.1, rel=1e-4)
        assert tied < 0.1
