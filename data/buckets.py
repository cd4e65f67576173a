"""Training batches of samples of similar length, padded to few fixed shapes."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from data.dataset import Source
from data.shuffle import permute

if TYPE_CHECKING:
    from torch import Tensor

# Samples are sorted by length within this many global batches. A larger window pads less, and shuffles less.
WINDOW = 50
_SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)


def bucket_widths(longest: int) -> tuple[int, ...]:
    """Return the widths that batches are padded to: ``longest``, and 1, 2, 3, 4 and 6 eighths of it.

    The eighths are rounded up to multiples of 8.
    """
    rounded = {-(-int(longest * share) // 8) * 8 for share in _SHARES}
    return (*sorted(width for width in rounded if 0 < width < longest), longest)


class VariableLength(Source):
    """A source whose batches can be padded to one of a few widths.

    Attributes:
        widths: In ascending order; every sample fits into the last.
    """

    widths: tuple[int, ...]

    @abstractmethod
    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return how many positions each sample fills, at most widths[-1]: integers of the shape of ``indices``."""

    @abstractmethod
    def read(self, indices: np.ndarray, epoch: int, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Return samples as Source.read does, padded to [b, width]; None for the last of ``widths``."""


class Buckets:
    """Which samples make up a global batch, and how wide it is.

    An epoch permutes the samples as it does without buckets. Every WINDOW global batches of that order are sorted by
    length, cut into batches again, and taken in a random order. A pure function of (seed, epoch, step) that knows
    nothing of replicas: all of them get equally many batches, of one shape at each step.
    """

    def __init__(self, source: VariableLength, global_batch_size: int, seed: int):
        self.source, self.global_batch_size, self.seed = source, global_batch_size, seed
        self.steps_per_epoch = len(source) // global_batch_size
        self._latest: tuple[tuple[int, int], np.ndarray] | None = None

    def batch(self, epoch: int, step: int) -> tuple[np.ndarray, int]:
        """Return the indices int64 [global_batch_size] and the width of a step, counted from 0 within the epoch."""
        window, number = divmod(step, WINDOW)
        # The next step mostly needs another batch of the same window.
        latest = self._latest
        if latest is None or latest[0] != (epoch, window):
            latest = self._latest = ((epoch, window), self._batches(epoch, window))
        indices = latest[1][number]
        longest = int(self.source.lengths(indices).max())
        return indices, next(width for width in self.source.widths if width >= longest)

    def _batches(self, epoch: int, window: int) -> np.ndarray:
        """Return the batches of a window in their order, int64 [batches, global_batch_size]."""
        count = min(WINDOW, self.steps_per_epoch - window * WINDOW)
        first = window * WINDOW * self.global_batch_size
        positions = np.arange(first, first + count * self.global_batch_size, dtype=np.int64)
        indices = permute(positions, len(self.source), key=(self.seed, epoch))
        by_length = np.argsort(self.source.lengths(indices), kind="stable").reshape(count, -1)
        # Within a batch not by length, so that the last replica does not get the longest samples every time.
        order = permute(np.arange(count), count, key=(self.seed, epoch, window))
        return indices[np.sort(by_length[order], axis=1)]
