"""A regression problem with a known answer: a fixed random linear teacher plus noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from common.machine import check_memory
from data.dataset import InMemory, check_at_least, once
from data.folds import Folded


class RandomRegression(Folded):
    """y = W x + noise, where x is standard normal and W random, scaled so that W x has the variance 1.

    It is made from the seed by numpy's generator, which gives the same numbers on every machine, and held as fp32.
    The best mean squared error that any model can reach is noise**2.
    """

    def __init__(
        self,
        samples: int = 10_000,
        in_features: int = 10,
        out_features: int = 5,
        noise: float = 0.1,
        seed: int = 1337,
        **options: Any,
    ):
        super().__init__(**options)
        check_at_least(1, samples=samples, in_features=in_features, out_features=out_features)
        check_at_least(0, noise=noise, seed=seed)
        self.samples, self.in_features, self.out_features = samples, in_features, out_features
        self.noise, self.seed = noise, seed

    @once
    def prepare(self) -> None:
        """Make the three splits, in milliseconds; nothing is written to the disk."""
        numbers = 1.2 * self.samples * (self.in_features + self.out_features) + self.in_features * self.out_features
        sizes = f"data.samples={self.samples} of data.in_features={self.in_features} and {self.out_features} targets"
        check_memory(12 * numbers, sizes, "choose smaller numbers")  # drawn as fp64, kept as fp32
        teacher = np.random.default_rng([self.seed, 0]).standard_normal((self.in_features, self.out_features))
        teacher /= np.sqrt(self.in_features)
        few = max(1, self.samples // 10)
        self.train = self._draw(teacher, 1, self.samples)
        self.valid = self._draw(teacher, 2, few)
        self.test = self._draw(teacher, 3, few)
        self.description = (
            f"random regression from {self.in_features} to {self.out_features} numbers, noise {self.noise}: "
            f"train {self.samples:,} samples, valid {few:,}, test {few:,}"
        )
        self.deal()

    def _draw(self, teacher: np.ndarray, stream: int, samples: int) -> InMemory:
        # Each split has its own stream, so that the size of one does not change the others.
        random = np.random.default_rng([self.seed, stream])
        inputs = random.standard_normal((samples, self.in_features))
        targets = inputs @ teacher + self.noise * random.standard_normal((samples, self.out_features))
        return InMemory(torch.from_numpy(inputs).float(), torch.from_numpy(targets).float())
