"""Training batches of similar length, padded to few fixed shapes."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from data.shuffle import permute
from data.source import Source

if TYPE_CHECKING:
    from torch import Tensor

# Within so many global batches samples are sorted by length. More of them waste less padding and mix less.
WINDOW = 50
_SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)


def bucket_widths(longest: int) -> tuple[int, ...]:
    """The widths that batches are padded to: `longest` and 1, 2, 3, 4 and 6 eighths of
    it, rounded up to multiples of 8."""
    rounded = {-(-int(longest * share) // 8) * 8 for share in _SHARES}
    return (*sorted(width for width in rounded if 0 < width < longest), longest)


class VariableLength(Source):
    """A source whose batches can be padded to one of a few widths.

    widths  rising; the last holds every sample
    """

    widths: tuple[int, ...]

    @abstractmethod
    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """How many positions each sample fills, at most widths[-1]; integers of the shape of `indices`."""

    @abstractmethod
    def read(self, indices: np.ndarray, epoch: int, width: int | None = None) -> tuple[Tensor, Tensor]:
        """As Source.read, padded to [b, width]; None: to the last of `widths`. It must hold the samples."""


class Buckets:
    """Which samples make up a global batch, and how wide it is.

    An epoch permutes the samples as it does without buckets. Every WINDOW global batches of that order are
    sorted by length, cut into batches again, and taken in a random order. A pure function of (seed, epoch, step)
    that knows nothing of replicas: all of them see equally many batches, of one shape at each step.
    """

    def __init__(self, source: VariableLength, global_batch_size: int, seed: int):
        self.source, self.global_batch_size, self.seed = source, global_batch_size, seed
        self.steps_per_epoch = len(source) // global_batch_size
        self._latest: tuple[tuple[int, int], np.ndarray] | None = None

    def batch(self, epoch: int, step: int) -> tuple[np.ndarray, int]:
        """(indices [global_batch_size] int64, width) of the step, counted from 0 within the epoch."""
        window, number = divmod(step, WINDOW)
        # A step needs one row of its window, and the next step mostly another row of the same one.
        latest = self._latest
        if latest is None or latest[0] != (epoch, window):
            latest = self._latest = ((epoch, window), self._batches(epoch, window))
        indices = latest[1][number]
        longest = int(self.source.lengths(indices).max())
        return indices, next(width for width in self.source.widths if width >= longest)

    def _batches(self, epoch: int, window: int) -> np.ndarray:
        """The batches of a window in their order, int64 [batches, global_batch_size]."""
        count = min(WINDOW, self.steps_per_epoch - window * WINDOW)
        first = window * WINDOW * self.global_batch_size
        positions = np.arange(first, first + count * self.global_batch_size, dtype=np.int64)
        indices = permute(positions, len(self.source), key=(self.seed, epoch))
        by_length = np.argsort(self.source.lengths(indices), kind="stable").reshape(count, -1)
        # Sorted by place within a batch, so that no replica gets its longest samples every time.
        order = permute(np.arange(count), count, key=(self.seed, epoch, window))
        return indices[np.sort(by_length[order], axis=1)]
