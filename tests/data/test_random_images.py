"""Random images of random classes."""

import numpy as np
import pytest
import torch

from common.errors import DataError
from data.random_images import RandomImages


def prepared(**settings) -> RandomImages:
    data = RandomImages(**{"image_size": 16} | settings)
    data.prepare()
    return data


def test_samples_have_the_published_shapes_by_default():
    data = prepared(image_size=128)
    inputs, targets = data.train.read(np.array([4, 1]), epoch=0)
    assert inputs.shape == (2, 3, 128, 128) and inputs.dtype == torch.float32
    assert targets.shape == (2,) and targets.dtype == torch.int64
    assert data.image_shape == (3, 128, 128) and data.num_classes == 1000
    assert data.vocab_size is None and data.seq_len is None


def test_pixels_are_standard_normal_and_classes_uniform():
    inputs, targets = prepared(samples=1000, num_classes=4).train.read(np.arange(1000), epoch=0)
    assert abs(float(inputs.mean())) < 0.01 and abs(float(inputs.std()) - 1) < 0.01
    assert torch.bincount(targets, minlength=4).sub(250).abs().max() < 75


def test_a_sample_depends_on_seed_split_and_index_alone():
    data = prepared()
    everything, classes = data.train.read(np.arange(20), epoch=0)
    inputs, targets = prepared(samples=10**9).train.read(np.array([19, 3]), epoch=7)
    assert torch.equal(inputs, everything[[19, 3]]) and torch.equal(targets, classes[[19, 3]])
    for other in (prepared(seed=1).train, data.valid, data.test):
        assert not torch.equal(other.read(np.arange(20), epoch=0)[0], everything)


def test_as_many_samples_as_asked_for_and_a_tenth_to_validate_and_to_test():
    data = prepared(samples=50)
    assert (len(data.train), len(data.valid), len(data.test)) == (50, 5, 5)
    assert "train 50, valid 5, test 5" in data.description


@pytest.mark.parametrize(
    "bad", [{"samples": 0}, {"image_size": 0}, {"channels": 0}, {"num_classes": 0}, {"seed": -1}, {"num_workers": -1}]
)
def test_senseless_numbers_are_errors_that_name_the_key(bad):
    (key, value) = next(iter(bad.items()))
    with pytest.raises(DataError, match=f"data.{key}={value}"):
        RandomImages(**bad)
