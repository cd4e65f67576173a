"""BatchNorm with one update of its running statistics a step; torch's layer as the reference."""

import pytest
import torch
from torch import nn

from models import batchnorm
from models.batchnorm import BatchNorm2d
from parallel.batchnorm import RunningStatistics

DRAWN = torch.Generator().manual_seed(1)
CHUNKS = [3 * torch.randn(4, 5, 6, 6, generator=DRAWN, dtype=torch.float64) + 1 for _ in range(3)]


def pair() -> tuple[BatchNorm2d, nn.BatchNorm2d]:
    """Ours and torch's, with the same weights and running statistics, none of them trivial."""
    ours, theirs = BatchNorm2d(5).double(), nn.BatchNorm2d(5).double()
    for tensor in (theirs.weight, theirs.bias, theirs.running_mean, theirs.running_var):
        tensor.detach().uniform_(0.5, 2.0, generator=DRAWN)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def step_of(chunks: list[torch.Tensor], norm: nn.Module) -> None:
    """What a strategy does in a step of these micro-batches."""
    statistics = RunningStatistics([norm], len(chunks), replicas=None)
    for chunk in chunks:
        norm(chunk)
        statistics.add(norm)
    statistics.take()
    statistics.update()


def moments(x: torch.Tensor) -> torch.Tensor:
    """[2, c] mean and unbiased variance."""
    return torch.stack((x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=True)))


def test_outputs_and_gradients_are_torch_s_in_training():
    results = []
    for norm in pair():
        x = CHUNKS[0].clone().requires_grad_()
        y = norm(x)
        results.append((y, *torch.autograd.grad(y.pow(3).sum(), (x, norm.weight, norm.bias))))
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dimensions, shape", [(1, (4, 5)), (1, (4, 5, 6)), (2, (4, 5, 6, 6)), (3, (4, 5, 2, 3, 2))])
def test_the_update_of_one_micro_batch_is_torch_s(dimensions, shape):
    name = f"BatchNorm{dimensions}d"
    ours, theirs = getattr(batchnorm, name)(5).double(), getattr(nn, name)(5).double()
    x = torch.randn(shape, generator=DRAWN, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    step_of([x], ours)
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value)
    with pytest.raises(ValueError, match="expected"):
        ours(x[..., None, None, None])


def test_evaluation_is_torch_s_and_counts_nothing():
    ours, theirs = pair()
    assert torch.equal(ours.eval()(CHUNKS[0]), theirs.eval()(CHUNKS[0]))
    assert not ours.moments.any()


def test_the_update_of_a_step_is_one_towards_the_mean_over_its_micro_batches():
    ours, theirs = pair()
    step_of(CHUNKS, ours)
    mean = sum(moments(chunk) for chunk in CHUNKS) / len(CHUNKS)
    running = torch.stack((theirs.running_mean, theirs.running_var))
    torch.testing.assert_close(torch.stack((ours.running_mean, ours.running_var)), 0.9 * running + 0.1 * mean)
    assert ours.num_batches_tracked == 1


def test_a_layer_that_stays_in_evaluation_mode_keeps_its_statistics():
    frozen, trained = BatchNorm2d(5).double().eval(), BatchNorm2d(5).double()
    step_of(CHUNKS, nn.Sequential(frozen, trained))
    assert torch.equal(frozen.running_var, torch.ones(5).double()) and frozen.num_batches_tracked == 0
    assert trained.running_mean.any() and trained.num_batches_tracked == 1


@pytest.mark.parametrize("channels_last", [False, True])
def test_bf16_inputs_give_bf16_outputs_and_float32_statistics(channels_last):
    norm = BatchNorm2d(5)
    x = CHUNKS[0].bfloat16()
    y = norm(x.to(memory_format=torch.channels_last) if channels_last else x)
    assert y.dtype == torch.bfloat16
    assert norm.moments.dtype == torch.float32
    torch.testing.assert_close(norm.moments.double(), moments(x.double()), rtol=1e-5, atol=1e-5)


def test_one_value_a_channel_is_an_error_and_no_division_by_zero():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        BatchNorm2d(5)(torch.randn(1, 5, 1, 1))
