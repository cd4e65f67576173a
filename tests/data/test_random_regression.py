"""The regression problem with a known answer."""

import pytest
import torch

from data.random_regression import RandomRegression


@pytest.fixture
def drawn(prepared):
    return lambda **options: prepared(RandomRegression, **options)


def teacher_of(data) -> torch.Tensor:
    return torch.linalg.lstsq(data.train.inputs, data.train.targets).solution


def test_the_splits_share_the_teacher_and_not_the_samples(drawn):
    data = drawn(samples=1000, noise=0.0)
    assert (len(data.train), len(data.valid), len(data.test)) == (1000, 100, 100)
    teacher = teacher_of(data)
    for split in (data.valid, data.test):
        assert torch.allclose(split.inputs @ teacher, split.targets, atol=1e-4)
        assert not torch.equal(split.inputs, data.train.inputs[:100])


def test_the_best_error_is_the_noise_squared(drawn):
    data = drawn(samples=20_000, noise=0.5)
    teacher = teacher_of(data)
    error = (data.valid.inputs @ teacher - data.valid.targets).square().mean()
    assert abs(float(error) - 0.25) < 0.02
