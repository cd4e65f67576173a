"""What the image data sets share: checks, splits, conversion and augmentation, on images made in memory."""

from functools import partial

import numpy as np
import pytest
import torch

from common.errors import DataError
from data.images import ImageData, Images, crop_and_flip, recolor, resize


class Made(ImageData):
    title, mean, std = "made up", (127.5,), (64.0,)

    def splits(self):
        raise NotImplementedError


LABELS = np.arange(20) % 10
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 3, 8, 8), dtype=np.uint8)


def source(shape=(3, 8, 8), augment=None, pixels=PIXELS, labels=LABELS) -> Images:
    images = Images(pixels, labels, Made(image_size=shape[1], channels=shape[0]), "made up")
    images.augment = augment
    return images


def test_holding_out_takes_the_same_share_of_each_class_and_every_sample_once():
    labels = np.repeat([0, 1, 2], [100, 500, 400])
    numbers = np.arange(1000).astype(np.uint8)[:, None, None, None]
    rest, held_out = source((1, 1, 1), pixels=numbers, labels=labels).hold_out(100)
    read = [part.read(np.arange(len(part)), 0) for part in (rest, held_out)]
    everything = source((1, 1, 1), pixels=numbers, labels=labels).read(np.arange(1000), 0)[0]
    assert torch.equal(torch.cat([images for images, _ in read]).sort(0)[0], everything.sort(0)[0])
    assert (torch.bincount(read[1][1]) - torch.tensor([10, 50, 40])).abs().max() <= 1
    assert np.array_equal(source((1, 1, 1), pixels=numbers, labels=labels).hold_out(100)[1]._rows, held_out._rows)


def test_batches_are_normalized_floats_and_class_indices_of_the_rows_of_a_split():
    split = source().part(np.array([7, 3, 4]))
    inputs, targets = split.read(np.array([2, 0]), epoch=0)
    assert inputs.dtype == torch.float32 and targets.dtype == torch.int64 and len(split) == 3
    assert torch.allclose(inputs, (torch.from_numpy(PIXELS[[4, 7]]).float() - 127.5) / 64)
    assert targets.tolist() == [4, 7]


def test_grey_becomes_three_equal_colours_and_colours_one_grey():
    grey = torch.rand(2, 1, 4, 4)
    colours = recolor(grey, 3)
    assert colours.shape == (2, 3, 4, 4) and torch.equal(colours[:, 2:], grey)
    assert torch.allclose(recolor(colours, 1), grey)


def test_other_numbers_of_channels_are_refused():
    with pytest.raises(DataError, match="data.channels=2: made up has images of 3 channels"):
        source((2, 8, 8))


@pytest.mark.parametrize("size", [4, 8, 13])
def test_an_image_of_one_colour_keeps_it_at_every_size(size):
    resized = resize(torch.full((2, 3, 8, 8), 0.5), size)
    assert resized.shape == (2, 3, size, size) and torch.allclose(resized, torch.tensor(0.5))


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 13, 13), (1, 5, 5)])
def test_a_sample_has_the_same_bits_in_every_batch(shape):
    images = source(shape, partial(crop_and_flip, seed=3))
    everything, _ = images.read(np.arange(20), epoch=2)
    for indices in ([5], [19, 5, 0], range(7, 20)):
        assert torch.equal(images.read(np.array(indices), epoch=2)[0], everything[list(indices)])


def test_augmentation_differs_from_epoch_to_epoch_and_from_seed_to_seed():
    made = {key: crop_and_flip(PIXELS, np.arange(20), *key) for key in ((0, 3), (1, 3), (0, 4))}
    assert all(np.array_equal(one, made[0, 3]) is (key == (0, 3)) for key, one in made.items())


def test_augmentation_draws_every_cut_and_mirror_image_equally_often():
    # The image's pixels are all different, so that those of the result tell what was drawn.
    n, size, padding = 16_200, 4, 1
    image = np.arange(1, 1 + size * size, dtype=np.uint8).reshape(1, 1, size, size)
    cut = crop_and_flip(np.repeat(image, n, axis=0), np.arange(n), epoch=5, seed=3, padding=padding)
    possible, counts = np.unique(cut.reshape(n, -1), axis=0, return_counts=True)
    assert len(possible) == 18  # 3 places down, 3 across, mirrored or not
    assert np.abs(counts - n / 18).max() < 5 * np.sqrt(n / 18)

    padded = np.pad(image[0, 0], padding)
    windows = [padded[y : y + size, x : x + size] for y in range(3) for x in range(3)]
    expected = np.array([w.ravel() for window in windows for w in (window, window[:, ::-1])])
    assert np.array_equal(possible, np.unique(expected, axis=0))
