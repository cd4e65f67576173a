"""Scikit-learn's handwritten digits: real images that are part of a package, so that no download is needed."""

from __future__ import annotations

import numpy as np

from common.errors import DataError
from common.packages import package_file
from data.dataset import Source
from data.images import ImageData, Images


class Digits(ImageData):
    """1,797 handwritten digits of 8x8 pixels, enlarged to the model's image size.

    80 % are to train on, 10 % each to validate and to test, with equal shares of each class.
    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (the test part).
    """

    title = "scikit-learn's handwritten digits"
    mean, std = (4.884,), (6.017,)  # of all pixels, which run from 0 to 16

    def splits(self) -> dict[str, Source]:
        """Return the three splits."""
        # Importing scikit-learn would cost every process a second and 100 MB.
        if (path := package_file("sklearn", "datasets/data/digits.csv.gz")) is None:
            raise DataError(
                "data=digits needs scikit-learn, which is not installed: pip install scikit-learn, or use other "
                "images, such as data=mnist or data=random_images"
            )
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
        images, labels = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
        tenth = len(images) // 10
        rest, test = Images(images, labels, self, self.title).hold_out(tenth)
        train, valid = rest.hold_out(0 if self.folds else tenth)
        return {"train": train, "valid": valid, "test": test}
