"""CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009), from a folder or downloaded."""

from __future__ import annotations

import hashlib
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import DataError
from data.images import Images, PublishedImages, crop_and_flip

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
_WAY_OUT = (
    f"Give the published folder {_FOLDER}, unpacked, by data.root=FOLDER, or leave out data.root to download it on a "
    "machine with a network"
)


class CIFAR10(PublishedImages):
    """50,000 + 10,000 photographs of 32x32 pixels: 45,000 to train on, 5,000 to validate and 10,000 to test."""

    # The red, green and blue pixels of the training images have these.
    mean = tuple(255 * value for value in (0.4914, 0.4822, 0.4465))
    std = tuple(255 * value for value in (0.2470, 0.2435, 0.2616))

    held_out = 10
    way_out = _WAY_OUT

    def __init__(
        self,
        root: str | None = None,
        augment: bool = True,
        image_size: int = 32,
        channels: int = 3,
        seed: int = 1337,
        **options: Any,
    ):
        super().__init__(root, image_size=image_size, channels=channels, **options)
        self.augmentation = partial(crop_and_flip, seed=seed) if augment else None
        self.title = "CIFAR-10" + ", cropped and mirrored at random" * augment

    def class_names(self) -> list[str]:
        """Return the published names of the classes."""
        return [*_CLASSES[: self.num_classes]]

    def read(self, root: Path, split: str) -> Images:
        """Read the published images of "train" or "test"."""
        folder = root if root.name == _FOLDER else root / _FOLDER
        batches = [_batch(folder / name, md5) for name, md5 in _FILES[split].items()]
        images = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([np.asarray(batch["labels"], np.int64) for batch in batches])
        return Images(images, labels, self, f"{folder} ({split})")


def _batch(path: Path, md5: str) -> dict:
    """Return the file's content. Pickles can run any code, so only the published bytes are unpickled."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. {_WAY_OUT}") from error
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != md5:
        raise DataError(
            f"{path} ({len(content):,} bytes, MD5 {actual}) is damaged or another file; the published one has MD5 "
            f"{md5}. {_WAY_OUT}"
        )
    return pickle.loads(content, encoding="latin1")
