"""What every `data=` option offers to the training loop: a DataSet, whose splits are Sources of samples by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from common.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from data.vocabulary import GPT2Vocabulary
    from data.words import WordVocabulary


class Source(ABC):
    """One split of a data set, with random access.

    Attributes:
        ordered: Whether training takes the samples in order in every epoch instead of shuffling them.
    """

    ordered: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor | tuple[Tensor, ...], Tensor]:
        """Returns samples as (inputs [b, ...], targets [b, ...]); a tuple of inputs where a model has several.

        A pure function: augmentation, where there is any, depends on (seed, epoch, index) alone.

        Args:
            indices: int64 [b], each in [0, len).
            epoch: The epoch, from 0 on.
        """

    def check_batch(self, global_batch_size: int) -> None:
        """Checks that training can take the samples in batches of this size, as it can unless this is overridden.

        Raises:
            DataError: It cannot.
        """
        return


class InMemory(Source):
    """Samples held as tensors.

    Attributes:
        inputs: [n, ...], or a tuple of such tensors where a model has several inputs.
        targets: [n, ...].
    """

    def __init__(self, inputs: Tensor | tuple[Tensor, ...], targets: Tensor):
        """Raises ValueError if inputs and targets differ in length."""
        for tensor in inputs if isinstance(inputs, tuple) else (inputs,):
            if len(tensor) != len(targets):
                raise ValueError(f"{len(tensor)} inputs and {len(targets)} targets; each input needs one target")
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor | tuple[Tensor, ...], Tensor]:
        """See Source."""
        import torch

        rows = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        if isinstance(self.inputs, tuple):
            return tuple(tensor[rows] for tensor in self.inputs), self.targets[rows]
        return self.inputs[rows], self.targets[rows]


class DataSet(ABC):
    """A data set as the configuration names it.

    Attributes:
        train: The samples to train on. After prepare().
        valid: The samples to validate on, or None where there is no such split or it is smaller than one sample. After
            prepare().
        test: As ``valid``, to test on. After prepare().
        description: One line: what the data is, and how much of it is in each split. After prepare().
        vocabulary: How text becomes tokens and tokens text. None for data that is not language and for tokens of an
            unknown vocabulary.
        vocab_size: The number of distinct tokens. None for data that is not language, and before prepare() where the
            text decides (words).
        seq_len: Tokens per sample. None for data that is not language.
        unigram_entropy: The loss, in nats, that counting the training tokens reaches: a model that has learned more is
            below it. After prepare(); None for data that is not text.
        fingerprint: A digest of all samples, where preparing them has made one anyhow; else empty. After prepare().
        num_workers: Processes that read ahead (see data.loader.train_loader).
        changing_shapes: Whether training batches differ in shape from step to step (see data.buckets).
    """

    vocabulary: GPT2Vocabulary | WordVocabulary | None = None
    vocab_size: int | None = None
    seq_len: int | None = None
    unigram_entropy: float | None = None
    changing_shapes: bool = False
    fingerprint: str = ""
    train: Source
    valid: Source | None
    test: Source | None
    description: str

    def __init__(self, num_workers: int = 0):
        """Raises DataError if ``num_workers`` is negative."""
        if num_workers < 0:
            raise DataError(f"data.num_workers={num_workers}: processes that read ahead must be 0 or more")
        self.num_workers = num_workers

    @abstractmethod
    def prepare(self) -> None:
        """Checks the data and builds caches. Called by the launching process, then by every worker.

        Cheap once the cache is built; does nothing the second time.

        Raises:
            DataError: The data is wrong or missing. The message says what to do.
        """
