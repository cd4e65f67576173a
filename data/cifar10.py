"""CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009), from a folder or downloaded."""

from __future__ import annotations

import hashlib
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import DataError
from common.files import expand_home, read_regular
from data.cache import cached_folder
from data.dataset import Source
from data.download import download
from data.images import ImageData, Images, Labelled, crop_and_flip, hold_out

_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FOLDER = "cifar-10-batches-py"
# The MD5 of each published file.
_FILES = {
    "train": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    "test": {"test_batch": "40351d587109b95175f43aff81a1287e"},
}
_WAYS_OUT = (
    f"Give the published folder {_FOLDER}, unpacked, by data.root=FOLDER, or leave data.root out on a machine with a "
    "network and it is downloaded"
)


class CIFAR10(ImageData):
    """50,000 + 10,000 photographs of 32x32 pixels: 45,000 to train on, 5,000 to validate and 10,000 to test.

    The 5,000 are taken from the published training images, the same ones every time, with equal shares of each class.
    """

    # Of the pixels of the training images: red, green and blue.
    mean = tuple(255 * value for value in (0.4914, 0.4822, 0.4465))
    std = tuple(255 * value for value in (0.2470, 0.2435, 0.2616))

    def __init__(
        self,
        root: str | None = None,
        augment: bool = True,
        image_size: int = 32,
        channels: int = 3,
        seed: int = 1337,
        **options: Any,
    ):
        """Checks the arguments; prepare() reads the data.

        Args:
            root: The folder cifar-10-batches-py, or the one that holds it; null: download it.
            augment: Train on random crops with a margin of 4 pixels and mirror images, new ones in each epoch.
            image_size: Pixels a side.
            channels: 3, or 1 for grey.
            seed: Of the augmentation; the run's seed.
            **options: The others of data.images.ImageData.

        Raises:
            DataError: An argument is out of range.
        """
        super().__init__(image_size, channels, **options)
        self.root = None if not root else expand_home(root).absolute()
        self.augment, self.seed = augment, seed

    def title(self) -> str:
        """Returns the name of the data set, and how it is augmented."""
        return "CIFAR-10" + (", cropped and mirrored at random" if self.augment else "")

    def class_names(self) -> list[str]:
        """Returns the published names; further classes have numbers."""
        return [*_CLASSES, *super().class_names()[len(_CLASSES) :]][: self.num_classes]

    def splits(self) -> dict[str, Source]:
        """Returns the three splits.

        Raises:
            DataError: A file is missing or not the published one, or the download fails.
        """
        root = self.root
        if root is None:
            root = cached_folder(self.cache_dir, "cifar10", lambda folder: download("CIFAR10", folder, _WAYS_OUT))
        folder = root if root.name == _FOLDER else root / _FOLDER
        published, test = (self._read(folder, split) for split in ("train", "test"))
        train, valid = hold_out(published.labels, len(published.labels) // 10)
        augment = partial(crop_and_flip, seed=self.seed) if self.augment else None
        return {
            "train": Images(published, train, self.mean, self.std, self.image_shape, augment),
            "valid": Images(published, valid, self.mean, self.std, self.image_shape),
            "test": Images(test, np.arange(len(test.labels)), self.mean, self.std, self.image_shape),
        }

    def _read(self, folder: Path, split: str) -> Labelled:
        batches = [_batch(folder / name, md5) for name, md5 in _FILES[split].items()]
        images = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([np.asarray(batch["labels"], np.int64) for batch in batches])
        return Labelled(images, labels, self.num_classes, f"{folder} ({split})")


def _batch(path: Path, md5: str) -> dict:
    """Returns the file's content. Pickles can run any code, so only the published bytes are unpickled."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. {_WAYS_OUT}") from error
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != md5:
        raise DataError(
            f"{path} ({len(content):,} bytes, MD5 {actual}) is damaged or another file: the published one has MD5 "
            f"{md5}. {_WAYS_OUT}"
        )
    return pickle.loads(content, encoding="latin1")
