"""BatchNorm's running statistics, which do not depend on the layout."""

import dataclasses

import torch
from cases import Layout, Recipe, weights_of

from models.batchnorm import BatchNorm2d
from parallel.batchnorm import RunningStatistics

ONE_STEP = Recipe("convnet", global_batch=32, lr=0.02, steps=1)


def test_they_are_the_momentum_average_of_the_steps_means(trained):
    (whole,) = trained(Layout("single", chunks=1), ONE_STEP)
    name = next(name for name in whole.state if name.endswith("running_mean"))
    (cut,) = trained(Layout("single", chunks=4), ONE_STEP)
    # The mean of equal micro-batches' means is the batch's mean; in the first BatchNorm, whose input is the data.
    torch.testing.assert_close(cut.state[name], whole.state[name])
    assert whole.state[name].abs().max() > 1e-3
    counts = [tensor for key, tensor in cut.state.items() if key.endswith("num_batches_tracked")]
    assert counts and all(count == 1 for count in counts)


def test_a_skipped_step_leaves_the_statistics_alone(trained):
    recipe = dataclasses.replace(ONE_STEP, overflow_at_step=1)
    for layout in (Layout("single", chunks=4), Layout("ddp", dp=2, chunks=2)):
        result = trained(layout, recipe)
        assert result[0].finite == [False]
        for name, tensor in weights_of(result).items():
            assert not name.endswith(("running_mean", "running_var")) or torch.equal(tensor, result[0].initial[name])


def test_after_a_step_that_was_not_finite_the_next_ones_statistics_are():
    norm = BatchNorm2d(3)
    images = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    statistics = RunningStatistics([norm], microbatches=1, replicas=None)
    for given in (images / 0, images):
        statistics.begin()
        norm(given)
        statistics.add(norm)
        statistics.take()
    statistics.update()
    torch.testing.assert_close(norm.running_mean, 0.1 * images.mean((0, 2, 3)))
