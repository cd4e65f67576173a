"""Scikit-learn's handwritten digits: real images that are part of a package, so that no download is needed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from common.errors import DataError
from data.dataset import Source
from data.images import ImageData, Labelled, hold_out


class Digits(ImageData):
    """1,797 handwritten digits of 8x8 pixels, enlarged to the model's image size.

    80 % are to train on, 10 % each to validate and to test, with equal shares of each class.
    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (the test part).
    """

    title = "scikit-learn's handwritten digits"
    mean, std = (4.884,), (6.017,)  # of all pixels, which run from 0 to 16

    def splits(self) -> dict[str, Source]:
        """Return the three splits."""
        table = np.loadtxt(_file(), delimiter=",", dtype=np.uint8)
        images, labels = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
        stored = Labelled(images, labels, self.num_classes, self.title)
        tenth = len(images) // 10
        rest, test = hold_out(stored.labels, tenth)
        train, valid = (rest[part] for part in hold_out(stored.labels[rest], tenth))
        return {s: self._images(stored, part) for s, part in (("train", train), ("valid", valid), ("test", test))}


def _file() -> Path:
    """Return scikit-learn's file. Importing the package would cost every process a second and 100 MB."""
    package = importlib.util.find_spec("sklearn")
    folders = (package and package.submodule_search_locations) or ()
    for folder in folders:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise DataError(
        "data=digits needs scikit-learn, which is not installed: pip install scikit-learn, or use other images, such "
        "as data=mnist or data=random_images"
    )
