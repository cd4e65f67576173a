"""Scikit-learn's handwritten digits."""

import numpy as np
import pytest
import torch

from common.errors import DataError
from data import digits
from data.digits import Digits


def everything(data: Digits) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [source.read(np.arange(len(source)), epoch=0) for source in (data.train, data.valid, data.test)]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


@pytest.mark.slow  # importing scikit-learn takes seconds
def test_they_are_the_images_that_scikit_learn_gives(prepared):
    from sklearn.datasets import load_digits

    inputs, targets = everything(prepared(Digits, image_size=8))
    published = load_digits()
    pixels = (inputs * digits.Digits.std[0] + digits.Digits.mean[0]).round().to(torch.uint8).flatten(1).numpy()
    ours = np.column_stack([pixels, targets.numpy()])
    theirs = np.column_stack([published.data, published.target])
    assert np.array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])


def test_they_are_normalised_and_come_in_the_size_and_channels_asked_for(prepared):
    inputs, targets = everything(prepared(Digits, image_size=8))
    assert inputs.shape == (1797, 1, 8, 8) and inputs.dtype == torch.float32 and targets.dtype == torch.int64
    assert abs(float(inputs.mean())) < 1e-3 and abs(float(inputs.std()) - 1) < 1e-3
    assert torch.bincount(targets).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180], "as published"
    data = prepared(Digits, image_size=32, channels=3)
    assert data.train.read(np.arange(5), epoch=0)[0].shape == (5, *data.image_shape) == (5, 3, 32, 32)


def test_without_scikit_learn_the_error_says_what_to_install(prepared, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        prepared(Digits)
