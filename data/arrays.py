"""Arrays of numpy in files: .npy, which are memory-mapped, and .npz, which are read into memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from torch import Tensor

from common.errors import DataError
from data.dataset import Rows, Source, check_fractions, given_path, mapped, once, to_tensor, widened
from data.documents import SPLITS
from data.folds import Folded, Part, Selected


class Arrays(Folded):
    """The rows of root/INPUTS.npy and root/TARGETS.npy, or of the arrays of these names in a file root.npz.

    Splits are the folders root/train, root/valid (or val) and root/test, or root/train.npz and so
    on. A split without files is a fraction of the rows to train on, which are drawn from ``seed``.
    """

    def __init__(
        self,
        root: str | None = None,
        inputs: str | list[str] = "inputs",
        targets: str | list[str] = "targets",
        valid: float = 0.1,
        test: float = 0.1,
        seed: int = 0,
        **options: Any,
    ):
        """Check the arguments. No file is opened before prepare().

        Raises:
            DataError: ``root`` is missing, or the fractions are out of range.
        """
        super().__init__(**options)
        self.root = given_path(root, "data=arrays needs the folder of the .npy files, or an .npz file: data.root=PATH")
        self.seed, self.held_out = seed, {"valid": valid, "test": test}
        check_fractions(self.held_out, "data.")
        self.inputs, self.targets = inputs, targets

    @once
    def prepare(self) -> None:
        """Open the arrays, and hold out training rows for splits without files.

        Raises:
            DataError: Arrays are missing, damaged, not of numbers, or do not fit together.
        """
        stored = {split: _Stored(place, self.inputs, self.targets) for split, place in self._places().items()}
        train, start, sources = stored["train"], 0, {}

        def rows(of: _Stored, start: int, size: int) -> Selected:
            return Selected(of, Part(len(of), start, size, key=(self.seed,)))

        for split, fraction in self.held_out.items():
            if split in stored:
                stored[split].check_like(train)
                sources[split] = rows(stored[split], 0, len(stored[split]))
            elif size := int(fraction * len(train)):
                sources[split] = rows(train, start, size)
                start += size
        back = 0 if self.folds is None or "valid" in stored else len(sources.pop("valid", ()))
        self.train = rows(train, start, len(train) - start + back)
        self.valid, self.test = sources.get("valid"), sources.get("test")
        shares = {s: "its own files" if s in stored else f"data.{s}={f:g}" for s, f in self.held_out.items()}
        counts = ", ".join(f"{split} {len(sources.get(split, ())):,} ({shares[split]})" for split in shares)
        self.description = f"arrays of {self.root}: train {len(self.train):,} rows, {counts}"
        self.deal()

    def _places(self) -> dict[str, Path]:
        """Return the folder or .npz file of each split that has one; of "train" only if nothing is divided."""
        if not self.root.exists():
            raise DataError(f"data.root={self.root} does not exist; give a folder of .npy files, or an .npz file")
        inside = sorted(self.root.iterdir()) if self.root.is_dir() else []
        found: dict[str, Path] = {}
        for path in inside:
            if path.stem in SPLITS and (path.is_dir() or path.suffix == ".npz"):
                if (other := found.setdefault(SPLITS[path.stem], path)) is not path:
                    raise DataError(f"data.root={self.root} has {other.name} and {path.name} for one split; keep one")
        if found and "train" not in found:
            names = ", ".join(path.name for path in found.values())
            raise DataError(f"data.root={self.root} has {names} and no train: put the arrays to train on into train")
        return found or {"train": self.root}


class _Stored(Source):
    """Arrays of equal length in a folder or an .npz file. Another process gets the path, and opens them again."""

    def __init__(self, place: Path, inputs: str | list[str], targets: str | list[str]) -> None:
        self.place, self.inputs, self.targets = place, inputs, targets
        each = [names if isinstance(names, list) else [names] for names in (inputs, targets)]
        self.arrays = {name: _opened(place, name) for name in itertools.chain(*each)}
        for name, array in self.arrays.items():
            to_tensor(f"{place}: {name}", array[:1].copy() if array.ndim else array)
            if len(array) != len(self):
                others = f"{[*self.arrays][-1]} {len(self):,}"
                raise DataError(f"{place}: {name} has {len(array):,} rows and {others}; give each input one target")

    def __len__(self) -> int:
        return len([*self.arrays.values()][-1])

    def __reduce__(self) -> tuple:
        return _Stored, (self.place, self.inputs, self.targets)

    def read(self, indices: np.ndarray, epoch: int) -> Rows:
        """Return inputs and targets of some rows, [b, ...] each."""

        def column(name: str) -> Tensor:
            return to_tensor(name, np.asarray(self.arrays[name][indices]))

        inputs, targets = (tuple(n) if isinstance(n, list) else n for n in (self.inputs, self.targets))
        return mapped(column, inputs), mapped(lambda name: widened(column(name)), targets)

    def ids(self, indices: np.ndarray) -> list:
        """Return the numbers of the rows in the files, from 0."""
        return indices.tolist()

    def check_like(self, train: _Stored) -> None:
        """Check that rows are like those to train on. Raises DataError."""
        for name, own in self.arrays.items():
            theirs = train.arrays[name]
            if (own.dtype, own.shape[1:]) != (theirs.dtype, theirs.shape[1:]):
                raise DataError(
                    f"{self.place}: {name} has rows of {own.dtype} {list(own.shape[1:])}, and {train.place} of "
                    f"{theirs.dtype} {list(theirs.shape[1:])}"
                )


def _opened(place: Path, name: str) -> np.ndarray:
    archive = place.suffix == ".npz"
    try:
        if not archive:
            return np.load(place / f"{name}.npy", mmap_mode="r")
        with np.load(place) as arrays:
            return arrays[name]
    except (KeyError, FileNotFoundError, NotADirectoryError):
        with_names = np.load(place).files if archive else sorted(path.stem for path in place.glob("*.npy"))
        raise DataError(
            f"{place} holds no array {name!r}; it has {', '.join(with_names) or 'none'}. Type data.inputs=NAME (or "
            "[NAME,NAME] for a model with several inputs) and data.targets=NAME, or several of them"
        ) from None
    except (ValueError, OSError, EOFError, BadZipFile) as error:
        raise DataError(f"{place}: {name} cannot be read ({error}); write numbers by numpy.save or savez") from error
