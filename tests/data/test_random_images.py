"""Random images of random classes."""

import numpy as np
import pytest
import torch

from data.random_images import RandomImages


@pytest.fixture
def drawn(prepared):
    return lambda **options: prepared(RandomImages, **{"image_size": 16} | options)


def test_pixels_are_standard_normal_and_classes_uniform(drawn):
    inputs, targets = drawn(samples=1000, num_classes=4).train.read(np.arange(1000), epoch=0)
    assert abs(float(inputs.mean())) < 0.01 and abs(float(inputs.std()) - 1) < 0.01
    assert torch.bincount(targets, minlength=4).sub(250).abs().max() < 75


def test_a_sample_depends_on_seed_split_and_index_alone(drawn):
    data = drawn()
    everything, classes = data.train.read(np.arange(20), epoch=0)
    inputs, targets = drawn(samples=10**9).train.read(np.array([19, 3]), epoch=7)
    assert torch.equal(inputs, everything[[19, 3]]) and torch.equal(targets, classes[[19, 3]])
    for other in (drawn(seed=1).train, data.valid, data.test):
        assert not torch.equal(other.read(np.arange(20), epoch=0)[0], everything)
