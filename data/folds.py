"""Cross-validation: with ``data.folds=5 data.fold=2``, one fifth of the training samples validates."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from torch import Tensor

from common.errors import DataError
from data.dataset import DataSet, Rows, Source
from data.loader import VariableLength, permute

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

        As in scikit-learn's KFold, the first ``samples % folds`` folds have one sample more. Samples that validate are
        not augmented.

        Raises:
            DataError: There are fewer samples than folds.
        """
        if self.folds is None or self.fold is None:
            return
        samples, unchanged = len(self.train), copy(self.train)
        unchanged.augment = None
        start, end = (first_of(fold, samples, self.folds) for fold in (self.fold, self.fold + 1))
        kind = _DealtByLength if isinstance(self.train, VariableLength) else _Dealt
        self.valid = _Dealt(unchanged, start, end - start)
        self.train = kind(self.train, end, samples - len(self.valid))
        self.description += (
            f"; of {samples:,} training samples, fold {self.fold} of {self.folds} validates ({len(self.valid):,}) and "
            f"the others train ({len(self.train):,})"
        )


def first_of(fold: int, samples: int, folds: int) -> int:
    """Return the position at which a fold begins. Raises DataError if there are fewer samples than folds."""
    if samples < folds:
        raise DataError(
            f"data.folds={folds}: there are only {samples} training samples; set data.folds={samples} or less"
        )
    return fold * (samples // folds) + min(fold, samples % folds)


class _Dealt(Source):
    """Some samples of a source: in a fixed random order, ``size`` of them from ``start`` on, around its end."""

    def __init__(self, source: Any, start: int, size: int) -> None:
        self.source, self.start, self.size = source, start, size

    def __len__(self) -> int:
        return self.size

    def rows(self, indices: np.ndarray) -> np.ndarray:
        samples = len(self.source)
        return permute((self.start + np.asarray(indices, np.int64)) % samples, samples, _KEY)

    def read(self, indices: np.ndarray, epoch: int) -> Rows:
        return self.source.read(self.rows(indices), epoch)


class _DealtByLength(_Dealt, VariableLength):
    """The same of samples of variable length."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.widths = self.source.widths

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self.source.lengths(self.rows(indices))

    def read(self, indices: np.ndarray, epoch: int, width: int | None = None) -> tuple[Tensor, Tensor]:
        return self.source.read(self.rows(indices), epoch, width)
