"""Every schedule and half precision on pretended GPUs; strategies are cells of tests/parallel/cells.py."""

from __future__ import annotations

import dataclasses

import pytest
from cases import Layout, Recipe
from cells import PUBLISHED, RECIPES
from comparing import assert_same_training

from parallel.schedules import SCHEDULES
from parallel.strategies import STRATEGIES

TOLERANCE = 1e-5  # relative, in float32

RECIPES = {
    model: dataclasses.replace(RECIPES[model], global_batch=4 if model == "resnet50" else 8, steps=3, eval_every=3)
    for model in PUBLISHED
}
SINGLE = Layout("single", chunks=4)
LAYOUTS = [
    Layout("model_parallel", pp=2, chunks=4),
    Layout("ddp", dp=2, chunks=2),
    Layout("pipelined", pp=2, chunks=4, schedule="1f1b"),
    Layout("pipe_ddp", dp=2, pp=2, chunks=2),
]


def on_gpu(recipe: Recipe, **changes) -> Recipe:
    return dataclasses.replace(recipe, device="cuda", **changes)


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=[] if name == "planned" else pytest.mark.slow) for name in SCHEDULES]
)
def test_every_schedule_trains_as_one_gpu_and_records_when_it_worked(trained, schedule):
    recipe = on_gpu(RECIPES["gpt2"], steps=5)  # of a planned schedule, the last runs in another order
    (reference,) = trained(SINGLE, recipe)
    run = trained(Layout("pipelined", pp=2, chunks=4, schedule=schedule), recipe)
    assert_same_training(run, reference, TOLERANCE)
    works = 2 * 4 * (2 if SCHEDULES[schedule].looped else 1)  # a forward and a backward of each micro-batch and stage
    for result in run:
        assert len(result.intervals) == recipe.steps
        for step in result.intervals:
            kinds = [i.kind for i in step if not i.kind.startswith(("receive", "backward_weight"))]
            assert len(kinds) == works
            assert all(i.start <= i.end for i in step)
        ends = [max(i.end for i in step) for step in result.intervals]
        assert ends == sorted(ends)


@pytest.mark.parametrize("layout", [SINGLE, *LAYOUTS], ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    "model, precision",
    [
        pytest.param(name, p, marks=[] if (name, p) == ("gpt2", "bf16") else pytest.mark.slow)
        for name in RECIPES
        if name != "resnet50"
        for p in ("bf16", "fp16")
    ],
)
def test_every_model_trains_under_every_strategy_in_half_precision(trained, model, layout, precision):
    (exact,) = trained(SINGLE, on_gpu(RECIPES[model]))
    run = trained(layout, on_gpu(RECIPES[model], precision=precision))
    for result in run:
        assert result.finite[-1]  # float16 finds its loss scale by steps that overflow
        assert result.losses[0] == pytest.approx(exact.losses[0], rel=2e-2)
        assert all(tensor.dtype.itemsize >= 4 for tensor in result.state.values())
        assert sum(result.waits[-1].values()) == 1, result.waits  # DistributedDataParallel has two steps of its own


def test_data_parallel_trains_in_the_precision_that_was_asked_for(trained):
    """Its threads know nothing of the run's autocast, its copies of the head share what the head remembers, and each
    drops out of its own samples what one GPU drops out of them."""
    assert STRATEGIES["data_parallel"].gpu_only
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 1e-2)):
        recipe = on_gpu(RECIPES["gpt2"], precision=precision)
        (reference,) = trained(SINGLE, recipe)
        (result,) = trained(Layout("data_parallel", chunks=4), recipe)
        assert result.losses == pytest.approx(reference.losses, rel=tolerance)
        assert result.norms == pytest.approx(reference.norms, rel=tolerance)


@pytest.mark.parametrize("comm_hook, tolerance", [("none", 1e-5), ("bf16", 1e-4)])
def test_synchronised_batchnorm_and_rounded_gradients_train_as_on_the_cpu(trained, ranks, comm_hook, tolerance):
    from cases import train

    recipe = dataclasses.replace(RECIPES["classifier"], sync_batchnorm=True)
    layout = Layout("ddp", dp=2, chunks=2, comm_hook=comm_hook)
    reference, _ = ranks.run(2, train, layout, recipe)
    run = trained(layout, on_gpu(recipe))
    assert run[0].losses == pytest.approx(reference.losses, rel=tolerance)
    assert run[0].norms == pytest.approx(reference.norms, rel=10 * tolerance)
    for result in run:
        assert sum(result.waits[-1].values()) == 1, result.waits
    if comm_hook == "none":
        assert_same_training(run, reference, tolerance)
