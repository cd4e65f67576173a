"""What the image data sets share: labelled uint8 images in memory, and batches of normalised floats cut from them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.errors import DataError
from data.dataset import DataSet
from data.shuffle import permute
from data.source import Source

if TYPE_CHECKING:
    from torch import Tensor

# (images uint8 [b, c, h, w], indices int64 [b], epoch) -> images of the same shape
Augment = Callable[[np.ndarray, np.ndarray, int], np.ndarray]

_LUMA = (0.299, 0.587, 0.114)  # red, green and blue in a grey value (ITU-R BT.601)


class ImageData(DataSet):
    """Images [b, channels, image_size, image_size] fp32, and their classes int64 [b] in [0, num_classes).

    image_shape: (channels, image_size, image_size), of one sample; known from the start, as num_classes is
    """

    def __init__(
        self, image_size: int, channels: int, num_classes: int, cache_dir: str | None = None, num_workers: int = 0
    ):
        """Raises DataError for a number below 1."""
        super().__init__(num_workers)
        for name, value in {"image_size": image_size, "channels": channels, "num_classes": num_classes}.items():
            if value < 1:
                raise DataError(f"data.{name}={value}: it must be at least 1")
        self.image_shape = (channels, image_size, image_size)
        self.num_classes = num_classes
        self.cache_dir = cache_dir
        self._prepared = False

    @abstractmethod
    def splits(self) -> Mapping[str, Source]:
        """The sources "train", "valid" and "test", of which the last two may be empty. Raises DataError."""

    @abstractmethod
    def title(self) -> str:
        """What the images are, in a few words, for the description."""

    def prepare(self) -> None:
        if self._prepared:
            return
        splits = self.splits()
        self.train = splits["train"]
        self.valid, self.test = (splits[name] if len(splits[name]) else None for name in ("valid", "test"))
        sizes = ", ".join(f"{name} {len(source):,}" for name, source in splits.items())
        shape = "x".join(map(str, self.image_shape))
        self.description = f"{self.title()}, {shape}, {self.num_classes:,} classes: {sizes} images"
        self._prepared = True


@dataclass(frozen=True)
class Labelled:
    """images: uint8 [n, channels, height, width]; labels: int64 [n]; origin: what error messages call them.

    Raises DataError if there is none, if their numbers differ, or for a label outside [0, num_classes).
    """

    images: np.ndarray
    labels: np.ndarray
    num_classes: int
    origin: str

    def __post_init__(self):
        if len(self.images) != len(self.labels) or not len(self.labels):
            raise DataError(
                f"{self.origin} holds {len(self.images):,} images and {len(self.labels):,} labels; "
                "give files with one label for each image, and one image at least"
            )
        bad = np.flatnonzero((self.labels < 0) | (self.labels >= self.num_classes))
        if len(bad):
            raise DataError(
                f"{self.origin}: the label of sample {bad[0]} is {self.labels[bad[0]]}, and those of "
                f"{self.num_classes} classes are 0 to {self.num_classes - 1} ({len(bad):,} of {len(self.labels):,} "
                "labels are outside). Mend the file, or raise data.num_classes, which is model.num_classes by default"
            )


def hold_out(labels: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples of all `labels` ([n]) as two sorted lists of indices: the rest, and `count` held out.

    The share of each class is kept to within one sample. The same for the same labels, whatever the run's seed:
    else a checkpoint might be tested on what another run had trained it on.
    """
    shuffled = permute(np.arange(len(labels)), len(labels), key=(0,))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    spread = (2 * np.arange(count) + 1) * len(labels) // (2 * count) if count else np.arange(0)
    held_out = np.sort(by_class[spread])
    return np.setdiff1d(np.arange(len(labels)), held_out), held_out


class Images(Source):
    """Some of the images of a `Labelled`, kept as bytes and converted batch by batch."""

    def __init__(
        self,
        stored: Labelled,
        rows: np.ndarray,
        mean: Sequence[float],
        std: Sequence[float],
        shape: tuple[int, int, int],
        augment: Augment | None = None,
    ):
        """rows: int64 [len], which of the images. mean, std: of the pixels as stored, one each per channel stored.

        shape: of the samples, (channels, height, width): grey is repeated as colours, colours are mixed to grey,
        and other sizes are interpolated (bilinear; averaging where they shrink).
        Raises DataError for other changes of the channels.
        """
        stored_channels = stored.images.shape[1]
        if shape[0] != stored_channels and {shape[0], stored_channels} != {1, 3}:
            raise DataError(
                f"data.channels={shape[0]}: {stored.origin} has images of {stored_channels} channels, which can be "
                "given as 1 (grey) or 3 (colours)"
            )
        self._stored, self._rows, self._shape, self._augment = stored, rows, shape, augment
        self._mean, self._std = (np.asarray(v, np.float32).reshape(-1, 1, 1) for v in (mean, std))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        import torch

        rows = self._rows[indices]
        images = self._stored.images[rows]
        if self._augment is not None:
            images = self._augment(images, np.asarray(indices), epoch)
        inputs = torch.from_numpy((images - self._mean) / self._std)
        return resize(recolour(inputs, self._shape[0]), self._shape[1]), torch.from_numpy(self._stored.labels[rows])


def recolour(images: Tensor, channels: int) -> Tensor:
    """[b, 1 or 3, h, w] -> [b, channels, h, w], channels being 1 or 3."""
    if images.shape[1] == channels:
        return images
    if channels == 3:
        return images.repeat(1, 3, 1, 1)
    red, green, blue = (share * images[:, i : i + 1] for i, share in enumerate(_LUMA))
    return red + green + blue


def resize(images: Tensor, size: int) -> Tensor:
    """[b, c, h, w] -> [b, c, size, size], bilinear."""
    import torch.nn.functional as F

    height, width = images.shape[2:]
    if (height, width) == (size, size):
        return images
    return F.interpolate(images, (size, size), mode="bilinear", antialias=size < max(height, width))


def crop_and_flip(images: np.ndarray, indices: np.ndarray, epoch: int, seed: int, padding: int = 4) -> np.ndarray:
    """Each image [c, h, w] of a batch cut at random from itself with `padding` black pixels around, and mirrored
    half of the time: the published augmentation of CIFAR-10.

    indices: int64 [b]. What happens to an image depends on (seed, epoch, its index) alone.
    """
    height, width = images.shape[2:]
    padded = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    # A permutation of so many numbers is as good as a random number of 62 bits for each index.
    random = permute(indices, 2**62, key=(seed, epoch, 1))
    places = 2 * padding + 1
    top, left, mirrored = random % places, random // places % places, random // places**2 % 2 == 1
    cut = windows[np.arange(len(images)), :, top, left]
    return np.where(mirrored[:, None, None, None], cut[..., ::-1], cut)
