"""Images in folders of classes: JPEG and PNG of any size, decoded by Pillow when they are needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from common.errors import DataError
from data.dataset import Source, given_path
from data.documents import SPLITS, find_files
from data.images import ImageData, Images
from data.jsonl import select_rows

_SUFFIXES = (".jpg", ".jpeg", ".png")  # in upper case, too


class ImageFolder(ImageData):
    """The images of root/CLASS, or of root/train/CLASS, root/val/CLASS and root/test/CLASS (or SPLITS' other words).

    Classes are numbered in the order of their names. If there is no folder to validate on, the 10th of every 20
    training images, in the order of their paths, goes to valid; if there is none to test on either, the 20th goes to
    test.

    Images are converted to RGB. The shorter side is resized to image_size, bilinearly with antialiasing, and the center
    is cut out. Only paths and labels are in memory. A damaged file is an error when it is read.
    """

    def __init__(
        self,
        root: str | None = None,
        image_size: int = 224,
        channels: int = 3,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        folds: int | None = None,
        fold: int | None = None,
        cache_dir: str | None = None,
        num_workers: int = 0,
    ):
        """See ImageData; ``mean`` and ``std`` are of red, green and blue from 0 to 1, by default ImageNet's."""
        kept = {"folds": folds, "fold": fold, "cache_dir": cache_dir, "num_workers": num_workers}
        super().__init__(image_size, channels, **kept)  # the classes are those of the folders
        self.root = given_path(root, "data=image_folder needs the folder of the images, data.root=FOLDER")
        self.title = f"images of {self.root}"
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise DataError(f"data.mean={mean} and data.std={std}: give three numbers each, and data.std above 0")
        self.mean, self.std = ([255 * value for value in values] for values in (mean, std))

    def class_names(self) -> list[str]:
        """Return the names of the classes' folders."""
        self.prepare()
        return self._names

    def splits(self) -> dict[str, Source]:
        """Return the three splits."""
        found = [path.relative_to(self.root) for path in find_files(self.root)]
        paths = [path for path in found if path.suffix.lower() in _SUFFIXES]
        # The class folders are in folders of splits, if there is one to train on.
        depth = int(any(_split_of(path) == "train" and len(path.parts) > 2 for path in paths))
        paths = [p for p in paths if len(p.parts) > depth + 1 and (not depth or _split_of(p))]
        if len(paths) < len(found):
            others = sorted(path.suffix or path.name for path in {*found} - {*paths})
            self.title += f" without {len(others):,} other files ({', '.join([*dict.fromkeys(others)][:9])})"
        if not paths:
            raise DataError(
                f"{self.title}: there is none; data.root=FOLDER needs folders of classes, CLASS/*.jpg or *.png"
            )
        names, labels = np.unique([path.parts[depth] for path in paths], return_inverse=True)
        self._names, self.num_classes = names.tolist(), len(names)
        files = _ImageFiles(self.root, paths, self.image_shape[1])
        images = Images(files, labels, self, self.title)
        split_of = np.array([_split_of(path) if depth else "train" for path in paths])
        rows = {split: np.flatnonzero(split_of == split) for split in np.unique(split_of)}
        selected = select_rows({split: len(listed) for split, listed in rows.items()}, self.folds)
        chosen = {s: rows.get(s, rows["train"])[part.row(np.arange(len(part)))] for s, part in selected.items()}
        return {split: images.part(part) for split, part in chosen.items()}


def _split_of(path: Path) -> str | None:
    return SPLITS.get(path.parts[0].lower())


class _ImageFiles:
    """RGB images uint8 [n, 3, size, size] that are read when they are indexed."""

    def __init__(self, folder: Path, paths: Sequence[Path], size: int):
        self.folder, self.shape = folder, (len(paths), 3, size, size)
        self._paths = np.array([os.fsencode(path) for path in paths])  # needs a tenth of the memory of Path objects

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        return np.stack([self._read(self.folder / os.fsdecode(path)) for path in self._paths[rows]])

    def ids(self, rows: np.ndarray) -> list[str]:
        """Return the paths of the images in the folder."""
        return [os.fsdecode(path) for path in self._paths[rows]]

    def _read(self, path: Path) -> np.ndarray:
        try:
            with Image.open(path, formats=("JPEG", "PNG")) as image:
                if image.mode.startswith("I"):  # 16 bits of gray, which convert() would cut off at 255
                    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
                elif image.mode == "P":
                    image = image.convert("RGBA")  # converting to RGB directly warns if the palette has transparency
                image = ImageOps.fit(image.convert("RGB"), self.shape[2:], Image.Resampling.BILINEAR)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} is damaged, or neither JPEG nor PNG: {error}. Replace it, or remove it") from error
        return np.asarray(image).transpose(2, 0, 1)
