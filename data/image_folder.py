"""Images in folders of classes: JPEG and PNG of any size, decoded by Pillow when they are needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from common.errors import DataError
from common.files import expand_home
from data.dataset import Source
from data.documents import find_files
from data.images import ImageData, Images, Labelled
from data.jsonl import HELD_OUT, PERIOD

_SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")
_SPLITS = {"train": "train", "val": "valid", "valid": "valid", "test": "test"}  # by the folder's name


class ImageFolder(ImageData):
    """The images of root/CLASS, or of root/train/CLASS, root/val/CLASS (or valid) and root/test/CLASS.

    Classes are numbered in the order of their names. Without a folder to validate on, the 10th of every 20 training
    images, in the order of their paths, goes to valid; without one to test on as well, the 20th to test.

    An image becomes RGB. Its shorter side is resized to image_size, bilinearly with antialiasing, and the centre is cut
    out. Only paths and labels are in memory. A damaged file is an error when it is read.
    """

    def __init__(
        self,
        root: str | None = None,
        image_size: int = 224,
        channels: int = 3,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        cache_dir: str | None = None,
        num_workers: int = 0,
    ):
        """See ImageData; ``mean`` and ``std`` are of red, green and blue from 0 to 1, by default ImageNet's."""
        super().__init__(image_size, channels, cache_dir=cache_dir, num_workers=num_workers)
        if not root:
            raise DataError("data=image_folder needs to know which images: data.root=FOLDER")
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise DataError(f"data.mean={mean} and data.std={std}: give three numbers each, and of data.std above 0")
        self.root = expand_home(root).absolute()
        self.mean, self.std = ([255 * value for value in values] for values in (mean, std))

    def class_names(self) -> list[str]:
        """Return the names of the classes' folders."""
        self.prepare()
        return self._names

    def title(self) -> str:
        """Return where the images are."""
        return f"images of {self.root}"

    def splits(self) -> dict[str, Source]:
        """Return the three splits."""
        folders = {"train": self.root}
        if any(path.is_dir() for path in self.root.glob("train/*")):
            folders = {split: self.root / name for name, split in _SPLITS.items() if (self.root / name).is_dir()}
        paths = {split: find_files(folder, suffix=_SUFFIXES) for split, folder in folders.items()}
        classes = {split: [path.relative_to(folders[split]).parts[0] for path in paths[split]] for split in paths}
        self._names = sorted({*classes["train"]} - {path.name for path in paths["train"]})
        self.num_classes = len(self._names)
        if not self._names:
            raise DataError(f"data.root={self.root} holds no folder with JPEG or PNG files in it; give one that does")
        rows = {split: np.arange(len(listed)) for split, listed in paths.items()}
        ...
