"""Cross-validation: with ``data.folds=5 data.fold=2``, one fifth of the training samples validates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import DataError
from data.dataset import DataSet, Rows, Source
from data.loader import permute

_KEY = (-1,)  # of the permutation that deals; no run's seed has a part in it, so repetitions share their folds


class Folded(DataSet):
    """A data set whose training samples can be dealt to folds. One fold validates, and the others train.

    A subclass whose validation samples are held out of those to train on leaves them there if ``folds`` is set, and
    calls ``deal()`` at the end of prepare().

    Attributes:
        folds: The number of folds; None without cross-validation.
        fold: The fold that validates, from 0 on.
    """

    def __init__(self, folds: int | None = None, fold: int | None = None, **options: Any):
        """Raise DataError if only one of the numbers is given, or there is no such fold."""
        super().__init__(**options)
        self.folds, self.fold = folds, fold
        if not (folds is fold is None or (folds is not None and fold is not None and 0 <= fold < folds > 1)):
            raise DataError(
                f"data.folds={folds} data.fold={fold}: data.folds is 2 or more, and data.fold the fold that validates, "
                "from 0 to data.folds - 1; to validate on each, type -m data.folds=5 data.fold=0,1,2,3,4"
            )

    def deal(self) -> None:
        """Replace ``train`` and ``valid`` by the other folds and the fold ``fold`` of ``train``, if there are folds.

        Samples that validate are not augmented. Raises DataError if there are fewer samples than folds.
        """
        if self.folds is not None:
            whole, parts = self.train, self.parts(len(self.train))
            self.train = Selected(whole, parts["train"])
            self.valid = Selected(whole.unaugmented(), parts["valid"])
            self.description += f"; {self.dealt(parts)}"

    def parts(self, samples: int) -> dict[str, Part]:
        """Return the samples of "train" and "valid" among all ``samples`` to train on, if there are folds.

        As in scikit-learn's KFold, the first ``samples % folds`` folds have one sample more. Raises DataError if there
        are fewer samples than folds.
        """
        if self.folds is None or self.fold is None:
            return {}
        if samples < self.folds:
            raise DataError(f"data.folds={self.folds} must be at most the number of training samples, {samples}")
        size, larger = divmod(samples, self.folds)
        start, size = self.fold * size + min(self.fold, larger), size + (self.fold < larger)
        return {"train": Part(samples, start + size, samples - size), "valid": Part(samples, start, size)}

    def dealt(self, parts: Mapping[str, Part]) -> str:
        """Return a phrase about the folds."""
        sizes = f"({len(parts['valid']):,} samples), the others train ({len(parts['train']):,})"
        return f"fold {self.fold} of {self.folds} validates {sizes}"


@dataclass(frozen=True)
class Part:
    """Some of ``samples``: in the random order of ``key``, ``size`` of them from ``start`` on, around its end.

    If they are samples ``of`` a selection of rows, ``row`` returns the rows.
    """

    samples: int
    start: int
    size: int
    of: Any = None
    key: tuple[int, ...] = field(default=_KEY, repr=False)

    def __len__(self) -> int:
        return self.size

    def row(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of each sample, int64 of the shape of ``indices``, which are in [0, len)."""
        own = permute((self.start + np.asarray(indices, np.int64)) % self.samples, self.samples, self.key)
        return own if self.of is None else self.of.row(own)


class Selected(Source):
    """Some samples of a source."""

    def __init__(self, source: Source, part: Part) -> None:
        self.source, self.part = source, part

    def __len__(self) -> int:
        return len(self.part)

    def read(self, indices: np.ndarray, epoch: int) -> Rows:
        """See Source."""
        return self.source.read(self.part.row(indices), epoch)

    def ids(self, indices: np.ndarray) -> list | None:
        """See Source."""
        return self.source.ids(self.part.row(indices))

    def unaugmented(self) -> Source:
        """See Source."""
        return Selected(self.source.unaugmented(), self.part)
