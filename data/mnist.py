"""MNIST (LeCun, Cortes and Burges, 1998), from a folder or downloaded by torchvision."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from common.errors import DataError
from data.cache import first_file
from data.images import Images, PublishedImages

_NAMES = {"train": "train", "test": "t10k"}
_FOLDERS = ("", "raw/", "MNIST/raw/")
_WAY_OUT = (
    "Give a folder with the four published files, packed (.gz) or not, by data.root=FOLDER, or leave out data.root to "
    "download them on a machine with a network"
)


class MNIST(PublishedImages):
    """60,000 + 10,000 handwritten digits of 28x28 pixels: 55,000 to train on, 5,000 to validate and 10,000 to test.

    Other data in this format (Fashion-MNIST, EMNIST) can also be read. A twelfth of its training images is to validate.
    """

    title = "MNIST"
    mean, std = (0.1307 * 255,), (0.3081 * 255,)  # of the pixels of the training images
    held_out = 12
    way_out = _WAY_OUT

    def read(self, root: Path, split: str) -> Images:
        """Read the published images of "train" or "test", in ``root`` or in MNIST/raw or raw there."""
        images, labels = (_find(root, f"{_NAMES[split]}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        return Images(read_idx(images, 3)[:, None], read_idx(labels, 1).astype(np.int64), self, str(labels))


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the uint8 array of an idx file, packed by gzip if its name ends in .gz."""
    length = 4 * (1 + dimensions)
    magic = bytes((0, 0, 8, dimensions))  # 8 stands for unsigned bytes
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or cannot be read: {error}. {_WAY_OUT}") from error
    if len(content) < length or content[:4] != magic:
        raise DataError(
            f"{path} is not an idx file of bytes in {dimensions} dimensions: it begins with "
            f"{content[:4].hex() or 'nothing'} instead of {magic.hex()}. {_WAY_OUT}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:length])
    if len(content) - length != math.prod(shape):
        raise DataError(
            f"{path} holds {len(content) - length:,} values after its header, which has {' x '.join(map(str, shape))} "
            f"= {math.prod(shape):,}; it is cut short or damaged. {_WAY_OUT}"
        )
    return np.frombuffer(content, np.uint8, offset=length).reshape(shape)


def _find(root: Path, name: str) -> Path:
    return first_file(root, [f"{folder}{name}{end}" for folder in _FOLDERS for end in ("", ".gz")], _WAY_OUT)
