"""Random images of random classes: input for measuring speed, of which nothing can be learned but by heart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.errors import DataError
from data.images import ImageData
from data.source import Source

if TYPE_CHECKING:
    from torch import Tensor

_STREAMS = {"train": 0, "valid": 1, "test": 2}


class RandomImages(ImageData):
    """Standard normal pixels and uniform classes, as PyTorch's tutorial on model parallelism has them.

    A sample is drawn from (seed, split, index) when it is read: the number of samples costs no memory.
    """

    def __init__(
        self,
        samples: int = 480,
        image_size: int = 128,
        channels: int = 3,
        num_classes: int = 1000,
        seed: int = 1337,
        cache_dir: str | None = None,
        num_workers: int = 0,
    ):
        """samples: how many to train on; valid and test hold a tenth of that each, at least one.

        image_size: pixels a side. cache_dir: not needed, taken so that all data sets take it.
        Raises DataError for a number below 1, or a negative seed.
        """
        super().__init__(image_size, channels, num_classes, cache_dir, num_workers)
        if samples < 1:
            raise DataError(f"data.samples={samples}: it must be at least 1")
        if seed < 0:
            raise DataError(f"data.seed={seed}: it may not be negative")
        self.samples, self.seed = samples, seed

    def title(self) -> str:
        return "random images"

    def splits(self) -> dict[str, Source]:
        few = max(1, self.samples // 10)
        sizes = {"train": self.samples, "valid": few, "test": few}
        return {
            name: _Drawn(size, (self.seed, _STREAMS[name]), self.image_shape, self.num_classes)
            for name, size in sizes.items()
        }


class _Drawn(Source):
    def __init__(self, samples: int, seed: tuple[int, ...], shape: tuple[int, int, int], num_classes: int):
        self._samples, self._seed, self._shape, self._num_classes = samples, seed, shape, num_classes

    def __len__(self) -> int:
        return self._samples

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        import torch

        inputs = np.empty((len(indices), *self._shape), np.float32)
        classes = np.empty(len(indices), np.int64)
        for i, index in enumerate(indices):
            # SFC64 is the fastest of numpy's generators, and a new one costs 8 microseconds.
            random = np.random.Generator(np.random.SFC64((*self._seed, int(index))))
            classes[i] = random.integers(self._num_classes)
            random.standard_normal(dtype=np.float32, out=inputs[i])
        return torch.from_numpy(inputs), torch.from_numpy(classes)
