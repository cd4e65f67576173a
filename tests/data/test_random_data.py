"""Data that is drawn: the regression problem with a known answer, and random images of random classes."""

import numpy as np
import torch

from data.random_images import RandomImages
from data.random_regression import RandomRegression


def teacher_of(data) -> torch.Tensor:
    return torch.linalg.lstsq(data.train.inputs, data.train.targets).solution


def test_the_splits_share_the_teacher_and_not_the_samples(prepared):
    data = prepared(RandomRegression, samples=1000, noise=0.0)
    assert (len(data.train), len(data.valid), len(data.test)) == (1000, 100, 100)
    teacher = teacher_of(data)
    for split in (data.valid, data.test):
        assert torch.allclose(split.inputs @ teacher, split.targets, atol=1e-4)
        assert not torch.equal(split.inputs, data.train.inputs[:100])


def test_the_best_error_is_the_noise_squared(prepared):
    data = prepared(RandomRegression, samples=20_000, noise=0.5)
    teacher = teacher_of(data)
    error = (data.valid.inputs @ teacher - data.valid.targets).square().mean()
    assert abs(float(error) - 0.25) < 0.02


def test_pixels_are_standard_normal_and_classes_uniform(prepared):
    inputs, targets = prepared(RandomImages, image_size=16, samples=1000, num_classes=4).train.read(
        np.arange(1000), epoch=0
    )
    assert abs(float(inputs.mean())) < 0.01 and abs(float(inputs.std()) - 1) < 0.01
    assert torch.bincount(targets, minlength=4).sub(250).abs().max() < 75


def test_a_sample_depends_on_seed_split_and_index_alone(prepared):
    data = prepared(RandomImages, image_size=16)
    everything, classes = data.train.read(np.arange(20), epoch=0)
    inputs, targets = prepared(RandomImages, image_size=16, samples=10**9).train.read(np.array([19, 3]), epoch=7)
    assert torch.equal(inputs, everything[[19, 3]]) and torch.equal(targets, classes[[19, 3]])
    for other in (prepared(RandomImages, image_size=16, seed=1).train, data.valid, data.test):
        assert not torch.equal(other.read(np.arange(20), epoch=0)[0], everything)
