"""The base of the image data sets: labeled uint8 images, and batches of normalized floats made from them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import DataError
from common.files import expand_home
from common.machine import check_memory
from common.packages import load_torchvision
from data.cache import cached_folder, downloading
from data.dataset import Source, check_at_least, once
from data.folds import Folded
from data.loader import permute

# (images uint8 [b, c, h, w], indices int64 [b], epoch) -> images of the same shape
Augment = Callable[[np.ndarray, np.ndarray, int], np.ndarray]

_LUMA = (0.299, 0.587, 0.114)  # the shares of red, green and blue in a gray value (ITU-R BT.601)


class ImageData(Folded):
    """Images fp32 [b, channels, image_size, image_size], and their classes int64 [b] in [0, num_classes).

    Attributes:
        title: A few words about the images, for the description.
        image_shape: (channels, image_size, image_size) of one sample.
        num_classes: The number of classes.
        mean: Subtracted from the stored pixels, one number per stored channel.
        std: The numbers by which the pixels are then divided.
    """

    title: str
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)

    def __init__(self, image_size: int = 28, channels: int = 1, num_classes: int = 10, **options: Any):
        """Check the arguments; prepare() reads the data.

        Args:
            image_size: Pixels per side.
            channels: 1 for gray, 3 for colors; gray images then have three equal channels.
            num_classes: The number of classes. Labels are in [0, num_classes).
            options: See DataSet.
        """
        super().__init__(**options)
        check_at_least(1, image_size=image_size, channels=channels, num_classes=num_classes)
        way_out = "choose a smaller data.image_size"
        check_memory(8 * channels * image_size**2, f"one image of data.image_size={image_size}", way_out)
        self.image_shape = (channels, image_size, image_size)
        self.num_classes = num_classes

    @abstractmethod
    def splits(self) -> Mapping[str, Source]:
        """Return the sources "train", "valid" and "test", the last two may be empty.

        Raises:
            DataError: If the data is wrong or missing.
        """

    @once
    def prepare(self) -> None:
        """Read the splits. See DataSet."""
        splits = self.splits()
        self.train = splits["train"]
        self.valid, self.test = (splits[name] if len(splits[name]) else None for name in ("valid", "test"))
        sizes = ", ".join(f"{name} {len(source):,}" for name, source in splits.items())
        shape = "x".join(map(str, self.image_shape))
        self.description = f"{self.title}, {shape}, {self.num_classes:,} classes: {sizes} images"
        self.deal()


class PublishedImages(ImageData):
    """The data set of torchvision with the name of the class, from a folder or downloaded once.

    Samples to validate on are always the same training images, with equal shares of each class.

    Attributes:
        held_out: One in ``held_out`` training images is held out to validate.
        way_out: The fix for missing or damaged files, for messages.
        augmentation: The function that augments training images; None if they are not augmented.
    """

    held_out: int
    way_out: str
    augmentation: Augment | None = None

    def __init__(self, root: str | None = None, **options: Any):
        super().__init__(**options)
        self.root = None if not root else expand_home(root).absolute()

    @abstractmethod
    def read(self, root: Path, split: str) -> Images:
        """Return the published images of "train" or "test" in a folder; raise DataError if they are wrong."""

    def splits(self) -> dict[str, Source]:
        """Return the three splits."""
        root = self.root
        if root is None:
            root = cached_folder(self.cache_dir, type(self).__name__.lower(), self._download)
        published = self.read(root, "train")
        train, valid = published.hold_out(0 if self.folds else len(published) // self.held_out)
        train.augment = self.augmentation
        return {"train": train, "valid": valid, "test": self.read(root, "test")}

    def _download(self, folder: Path) -> None:
        """Download the files by torchvision, which checks their hashes."""
        name = type(self).__name__
        with downloading(name, self.way_out):
            getattr(load_torchvision().datasets, name)(folder, download=True)


class Images(Source):
    """Labeled images, which are kept as bytes and converted batch by batch.

    Attributes:
        augment: Changes the images of a batch, by their indices and the epoch; None for no changes.
    """

    augment: Augment | None = None

    def __init__(self, images: Any, labels: np.ndarray, data: ImageData, origin: str):
        """Check images and labels.

        Args:
            images: uint8 [n, channels, height, width]: an array, or an object with this shape, which reads images when
                it is indexed by an array.
            labels: int64 [n], each in [0, num_classes).
            data: The data set, for the number of classes, for the shape of the samples, and for mean and std of the
                stored pixels. Gray is repeated as colors, colors are mixed to gray, and other sizes are interpolated
                (bilinear, with antialiasing if they shrink).
            origin: The name of the data in error messages.

        Raises:
            DataError: If there are no images, the numbers of images and labels differ, a label is out of range, or
                other numbers of channels would have to be converted.
        """
        if len(images) != len(labels) or not len(labels):
            raise DataError(
                f"{origin} has {len(images):,} images and {len(labels):,} labels; give one label for each image, and "
                "at least one image"
            )
        classes, bad = data.num_classes, np.flatnonzero((labels < 0) | (labels >= data.num_classes))
        if len(bad):
            raise DataError(
                f"{origin}: the label of sample {bad[0]} is {labels[bad[0]]}, but those of {classes} classes are 0 to "
                f"{classes - 1} ({len(bad):,} of {len(labels):,} labels are outside). Correct the file or raise "
                "data.num_classes, which is model.num_classes by default"
            )
        channels, stored_channels = data.image_shape[0], images.shape[1]
        if channels != stored_channels and {channels, stored_channels} != {1, 3}:
            raise DataError(
                f"data.channels={channels}: {origin} has images of {stored_channels} channels; only 1 (gray) and 3 "
                "(colors) can be converted into each other"
            )
        self._images, self._labels, self._rows = images, labels, np.arange(len(labels))
        self._shape = data.image_shape
        self._mean, self._std = (np.asarray(v, np.float32).reshape(-1, 1, 1) for v in (data.mean, data.std))

    def __len__(self) -> int:
        return len(self._rows)

    def ids(self, indices: np.ndarray) -> list | None:
        """See Source. Images of files have their paths."""
        return self._images.ids(self._rows[indices]) if hasattr(self._images, "ids") else None

    def part(self, indices: np.ndarray) -> Images:
        """Return some of these images, int64 [len], with the same memory."""
        part = copy(self)
        part._rows = self._rows[indices]
        return part

    def hold_out(self, count: int) -> tuple[Images, Images]:
        """Return the images that are left and ``count`` images that are held out, both in their order.

        Each class has the same share in both to within one image. The choice depends only on the labels, not on the
        run's seed. Otherwise a checkpoint could be tested on images on which another run has trained it.
        """
        shuffled = permute(np.arange(len(self)), len(self), key=(0,))
        by_class = shuffled[np.argsort(self._labels[self._rows][shuffled], kind="stable")]
        spread = (2 * np.arange(count) + 1) * len(self) // (2 * count) if count else np.arange(0)
        held_out = np.sort(by_class[spread])
        return self.part(np.setdiff1d(np.arange(len(self)), held_out)), self.part(held_out)

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        """Return images fp32 [b, *shape] and classes int64 [b]."""
        rows = self._rows[indices]
        images = self._images[rows]
        if self.augment is not None:
            images = self.augment(images, np.asarray(indices), epoch)
        inputs = torch.from_numpy((images - self._mean) / self._std)
        return resize(recolor(inputs, self._shape[0]), self._shape[1]), torch.from_numpy(self._labels[rows])


def recolor(images: Tensor, channels: int) -> Tensor:
    """Convert images [b, 1 or 3, h, w] to [b, channels, h, w], where ``channels`` is 1 or 3."""
    if images.shape[1] == channels:
        return images
    if channels == 3:
        return images.repeat(1, 3, 1, 1)
    red, green, blue = (share * images[:, i : i + 1] for i, share in enumerate(_LUMA))
    return red + green + blue


def resize(images: Tensor, size: int) -> Tensor:
    """Interpolate images [b, c, h, w] to [b, c, size, size], bilinearly."""
    height, width = images.shape[2:]
    if (height, width) == (size, size):
        return images
    return F.interpolate(images, (size, size), mode="bilinear", antialias=size < max(height, width))


def crop_and_flip(images: np.ndarray, indices: np.ndarray, epoch: int, seed: int, padding: int = 4) -> np.ndarray:
    """Pad images, crop each at random to its size, and mirror it half of the time: CIFAR-10's augmentation.

    Images are uint8 [b, c, h, w], ``indices`` int64 [b]. Crops are taken from the images with ``padding`` black pixels
    on each side. The changes to an image depend only on (seed, epoch, its index).
    """
    height, width = images.shape[2:]
    padded = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    # A permutation of so many numbers is as good as a random number of 62 bits for each index.
    random = permute(indices, 2**62, key=(seed, epoch, 1))
    offsets = 2 * padding + 1
    top, left, mirrored = random % offsets, random // offsets % offsets, random // offsets**2 % 2 == 1
    cropped = windows[np.arange(len(images)), :, top, left]
    return np.where(mirrored[:, None, None, None], cropped[..., ::-1], cropped)
