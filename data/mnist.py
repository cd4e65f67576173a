"""MNIST (LeCun, Cortes and Burges, 1998), from a folder or downloaded by torchvision."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import DataError
from common.files import expand_home
from data.cache import cached_folder
from data.dataset import Source
from data.download import download
from data.images import ImageData, Images, Labelled, hold_out

_FILES = {name: (f"{name}-images-idx3-ubyte", f"{name}-labels-idx1-ubyte") for name in ("train", "t10k")}
_MOST_VALUES = 1 << 30
_WAYS_OUT = (
    "Give a folder with the four published files, packed (.gz) or not, by data.root=FOLDER, or leave data.root out on "
    "a machine with a network and they are downloaded"
)


class MNIST(ImageData):
    """60,000 + 10,000 handwritten digits of 28x28 pixels: 55,000 to train on, 5,000 to validate and 10,000 to test.

    The 5,000 are taken from the published training images, the same ones every time, with equal shares of each class.
    Other data in this format (Fashion-MNIST, EMNIST) is read too, and a twelfth of it is to validate.
    """

    mean, std = (0.1307 * 255,), (0.3081 * 255,)  # of the pixels of the training images

    def __init__(self, root: str | None = None, **options: Any):
        """Checks the arguments; prepare() reads the data.

        Args:
            root: The folder of the four files, or one that holds it as MNIST/raw or raw; null: download them.
            **options: Those of data.images.ImageData.

        Raises:
            DataError: An argument is out of range.
        """
        super().__init__(**options)
        self.root = None if not root else expand_home(root).absolute()

    def title(self) -> str:
        """Returns the name of the data set."""
        return "MNIST"

    def splits(self) -> dict[str, Source]:
        """Returns the three splits.

        Raises:
            DataError: A file is missing, damaged or of another format, a label is out of range, or the download fails.
        """
        root = self.root
        if root is None:
            root = cached_folder(self.cache_dir, "mnist", lambda folder: download("MNIST", folder, _WAYS_OUT))
        folder = _folder(root)
        published, test = (self._read(folder, name) for name in ("train", "t10k"))
        train, valid = hold_out(published.labels, len(published.labels) // 12)
        parts = {"train": (published, train), "valid": (published, valid), "test": (test, np.arange(len(test.labels)))}
        return {name: Images(*part, self.mean, self.std, self.image_shape) for name, part in parts.items()}

    def _read(self, folder: Path, name: str) -> Labelled:
        images, labels = (_find(folder, file) for file in _FILES[name])
        return Labelled(
            read_idx(images, 3)[:, None], read_idx(labels, 1).astype(np.int64), self.num_classes, str(labels)
        )


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Reads an idx file, packed by gzip if its name ends in .gz.

    Args:
        path: The file.
        dimensions: How many the array in it has.

    Returns:
        The array, uint8.

    Raises:
        DataError: The file cannot be read, is truncated, or is not such a file.
    """
    length = 4 * (1 + dimensions)
    magic = bytes((0, 0, 8, dimensions))  # 8 stands for unsigned bytes
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            header = file.read(length)
            if len(header) < length or header[:4] != magic:
                raise DataError(
                    f"{path} is no idx file of bytes in {dimensions} dimensions: it has {path.stat().st_size:,} bytes "
                    f"and begins with {header[:4].hex() or 'nothing'} instead of {magic.hex()}. {_WAYS_OUT}"
                )
            shape = struct.unpack(f">{dimensions}I", header[4:])
            count = math.prod(shape)
            if count > _MOST_VALUES:
                raise DataError(
                    f"{path} says that it holds {' x '.join(map(str, shape))} = {count:,} values, more than the "
                    f"{_MOST_VALUES:,} that are read: it is damaged. {_WAYS_OUT}"
                )
            content = file.read(count + 1)  # one more than the header promises: a packed file can hold GB in a few MB
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or cannot be read: {error}. {_WAYS_OUT}") from error
    if len(content) != count:
        more = " or more" if len(content) > count else ""
        raise DataError(
            f"{path} holds {len(content):,} values{more} after its header, which says "
            f"{' x '.join(map(str, shape))} = {count:,}: it is cut short or damaged. {_WAYS_OUT}"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _folder(root: Path) -> Path:
    if not root.is_dir():
        raise DataError(f"data.root={root} is not a folder that exists. {_WAYS_OUT}")
    places = (root, root / "raw", root / "MNIST" / "raw")
    names = [name for pair in _FILES.values() for name in pair]
    for place in places:
        if any((place / f"{name}{suffix}").is_file() for name in names for suffix in ("", ".gz")):
            return place
    raise DataError(f"data.root={root} holds none of {', '.join(names)}, with or without .gz. {_WAYS_OUT}")


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder} holds no {name} and no {name}.gz. {_WAYS_OUT}")
