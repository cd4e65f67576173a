"""Samples by index: the one thing that a batch needs of a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Source(ABC):
    """One split of a data set, with random access."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        """The samples at `indices` (int64 [b], each in [0, len)) as (inputs [b, ...], targets [b, ...]).

        A pure function: augmentation, where there is any, depends on (seed, epoch, index) alone.
        """


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
