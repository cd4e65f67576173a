"""BatchNorm with one update of its running statistics a step; torch's layer as the reference."""

import pytest
import torch
from torch import nn

from models import batchnorm
from models.batchnorm import BatchNorm2d
from parallel.batchnorm import RunningStatistics

DRAWN = torch.Generator().manual_seed(1)
IMAGES = 3 * torch.randn(4, 5, 6, 6, generator=DRAWN, dtype=torch.float64) + 1


@pytest.mark.parametrize("dimensions, shape", [(1, (4, 5)), (1, (4, 5, 6)), (2, (4, 5, 6, 6)), (3, (4, 5, 2, 3, 2))])
def test_the_update_of_one_micro_batch_is_torch_s(dimensions, shape):
    name = f"BatchNorm{dimensions}d"
    ours, theirs = getattr(batchnorm, name)(5).double(), getattr(nn, name)(5).double()
    x = torch.randn(shape, generator=DRAWN, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    statistics = RunningStatistics([ours], microbatches=1, replicas=None)
    statistics.add(ours)
    statistics.take()
    statistics.update()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value)
    with pytest.raises(ValueError, match="expected"):
        ours(x[..., None, None, None])


def test_evaluation_is_torch_s_and_counts_nothing():
    ours, theirs = BatchNorm2d(5).double(), nn.BatchNorm2d(5).double()
    for tensor in (theirs.weight, theirs.bias, theirs.running_mean, theirs.running_var):
        tensor.detach().uniform_(0.5, 2.0, generator=DRAWN)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.eval()(IMAGES), theirs.eval()(IMAGES))
    assert not ours.moments.any()


@pytest.mark.parametrize("channels_last", [False, True])
def test_bf16_inputs_give_bf16_outputs_and_float32_statistics(channels_last):
    norm = BatchNorm2d(5)
    x = IMAGES.bfloat16()
    y = norm(x.to(memory_format=torch.channels_last) if channels_last else x)
    assert y.dtype == torch.bfloat16
    assert norm.moments.dtype == torch.float32
    variance, mean = torch.var_mean(x.double(), (0, 2, 3))
    torch.testing.assert_close(norm.moments.double(), torch.stack((mean, variance)), rtol=1e-5, atol=1e-5)


def test_one_value_a_channel_is_an_error_and_no_division_by_zero():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        BatchNorm2d(5)(torch.randn(1, 5, 1, 1))
