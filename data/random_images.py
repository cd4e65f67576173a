"""Random images of random classes, for measuring speed. A model can only memorize them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.dataset import Source, check_at_least
from data.images import ImageData

_KEPT_BYTES = 2**29  # 890 images of 224 pixels


class RandomImages(ImageData):
    """Standard normal pixels and uniform classes, as in PyTorch's tutorial on model parallelism.

    A sample is drawn from (seed, split, index) when it is first read, which takes 2 ms for 224 pixels. A split of at
    most 512 MiB is kept, so that a GPU does not wait in later epochs; samples of a larger split are drawn every time.
    """

    title = "random images"

    def __init__(
        self,
        samples: int = 480,
        image_size: int = 128,
        channels: int = 3,
        num_classes: int = 1000,
        seed: int = 1337,
        **options: Any,
    ):
        super().__init__(image_size, channels, num_classes, **options)
        check_at_least(1, samples=samples)
        check_at_least(0, seed=seed)
        self.samples, self.seed = samples, seed

    def splits(self) -> dict[str, Source]:
        """Return the three splits, each with other random numbers."""
        few = max(1, self.samples // 10)
        sizes = {"train": self.samples, "valid": few, "test": few}
        return {
            name: _Drawn(size, (self.seed, stream), self.image_shape, self.num_classes)
            for stream, (name, size) in enumerate(sizes.items())
        }


class _Drawn(Source):
    def __init__(self, samples: int, seed: tuple[int, ...], shape: tuple[int, int, int], num_classes: int):
        self._samples, self._seed, self._shape, self._num_classes = samples, seed, shape, num_classes
        self._keeps = 4 * samples * math.prod(shape) <= _KEPT_BYTES
        self._kept: dict[int, tuple[np.ndarray, int]] = {}

    def __len__(self) -> int:
        return self._samples

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        inputs = np.empty((len(indices), *self._shape), np.float32)
        classes = np.empty(len(indices), np.int64)
        for i, index in enumerate(map(int, indices)):
            if index in self._kept:
                inputs[i], classes[i] = self._kept[index]
                continue
            # SFC64 is the fastest of numpy's generators, and a new one costs 8 microseconds.
            random = np.random.Generator(np.random.SFC64((*self._seed, index)))
            classes[i] = random.integers(self._num_classes)
            random.standard_normal(dtype=np.float32, out=inputs[i])
            if self._keeps:
                self._kept[index] = inputs[i].copy(), int(classes[i])
        return torch.from_numpy(inputs), torch.from_numpy(classes)
