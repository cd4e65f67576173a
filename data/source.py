"""Samples by index: the one thing that a batch needs of a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Source(ABC):
    """One split of a data set, with random access.

    ordered: training takes the samples in order in every epoch, instead of shuffling them
    """

    ordered: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        """The samples at `indices` (int64 [b], each in [0, len)) as (inputs [b, ...], targets [b, ...]).

        A pure function: augmentation, where there is any, depends on (seed, epoch, index) alone.
        """

    def check_batch(self, global_batch_size: int) -> None:
        """Raises DataError where training cannot take the samples in batches of this size."""
        return


class InMemory(Source):
    """Samples held as two tensors: inputs [n, ...] and targets [n, ...]."""

    def __init__(self, inputs: Tensor, targets: Tensor):
        """Raises ValueError if the two differ in length."""
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets; each input needs one target")
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        import torch

        picked = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return self.inputs[picked], self.targets[picked]


class Concatenated(Source):
    """The samples of some sources, one source after the other."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = list(sources)
        self.ends = np.cumsum([len(source) for source in self.sources])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        import torch

        indices = np.asarray(indices, dtype=np.int64)
        numbers = np.searchsorted(self.ends, indices, side="right")
        order, parts = [], []
        for number in np.unique(numbers):
            mine = np.flatnonzero(numbers == number)
            source = self.sources[number]
            order.append(mine)
            parts.append(source.read(indices[mine] - (self.ends[number] - len(source)), epoch))
        back = torch.from_numpy(np.argsort(np.concatenate(order)))
        inputs, targets = (torch.cat(tensors)[back] for tensors in zip(*parts, strict=True))
        return inputs, targets
