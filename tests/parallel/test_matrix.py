"""Six models under all strategies, and images under each schedule: all the same training.

``python -m benchmarks parity`` makes the README's table.
"""

from __future__ import annotations

import dataclasses

import pytest
from cases import Layout, Recipe
from comparing import assert_same_training

from parallel.schedules import NAMES, SCHEDULES
from parallel.strategies import STRATEGIES, StrategyInfo

TOLERANCE = 1e-5  # relative, in float32

RECIPES = {
    "toy": Recipe("toy", global_batch=16, lr=0.02, steps=8, eval_every=4),
    # Chaotic in float32 (another number of threads moves its loss by percents): float64, and a small rate.
    "resnet50": Recipe("resnet50", global_batch=8, lr=1e-3, momentum=0.0, steps=2, eval_every=2, precision="fp64"),
    "transformer": Recipe("transformer", global_batch=16, lr=0.2, clip=0.5, steps=4, eval_every=2, dropout=0.2),
    "gpt2": Recipe("gpt2", global_batch=16, lr=0.2, clip=0.25, steps=4, eval_every=2),
    "classifier": Recipe("classifier", global_batch=16, lr=0.02, steps=4, eval_every=2),
    "convnet": Recipe("convnet", global_batch=32, lr=0.02, steps=4, eval_every=2),
}


def small_layout(name: str, info: StrategyInfo) -> Layout:
    """Two replicas and two stages, where the strategy has them; four micro-batches in all."""
    hybrid = info.shards == "node"  # two groups of two
    dp, pp = (1 + info.replicas) * (1 + hybrid), 1 + info.stages
    shard = 2 if hybrid else None
    return Layout(name, dp=dp, pp=pp, chunks=4 // dp, schedule="gpipe" if info.replicas else "1f1b", shard=shard)


# Every registered strategy: a new one is compared without a change here.
LAYOUTS = [small_layout(name, info) for name, info in STRATEGIES.items() if not info.gpu_only and name != "single"]


NORMALISED = ("resnet50", "whole resnet50", "convnet")  # by BatchNorm, over the micro-batch
# `pytest -m slow` has all 16 blocks of ResNet-50, the others 5 of them.
RECIPES["whole resnet50"] = dataclasses.replace(RECIPES["resnet50"], model="whole resnet50")
CELLS = [
    pytest.param(model, layout, id=f"{model}-{layout.name}", marks=[pytest.mark.slow] * model.startswith("whole"))
    for model in RECIPES
    for layout in LAYOUTS
]


@pytest.mark.parametrize("model, layout", CELLS)
def test_every_model_trains_under_every_strategy_as_in_one_process(trained, model, layout):
    recipe = RECIPES[model]
    (reference,) = trained(layout.same_cut if model in NORMALISED else Layout("single"), recipe)
    assert reference.losses[-1] < reference.losses[0], "nothing was learned: the comparison would say little"
    assert reference.evaluations
    assert_same_training(trained(layout, recipe), reference, 1e-10 if recipe.precision == "fp64" else TOLERANCE)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if SCHEDULES[name].looped and name in NAMES])
def test_stages_that_end_in_views_train_as_in_one_process(trained, schedule):
    """Images in channels_last cross the first two borders, what a pooling flattened the third."""
    recipe = RECIPES["resnet50"]
    (reference,) = trained(Layout("single", chunks=4), recipe)
    layout = Layout("pipelined", pp=2, chunks=4, schedule=schedule, balance=(5, 2, 3, 1))
    assert_same_training(trained(layout, recipe), reference, 1e-10)
