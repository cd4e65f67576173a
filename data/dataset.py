"""What every `data=` option offers to the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from common.errors import DataError
from data.source import Source

if TYPE_CHECKING:
    from data.vocabulary import GPT2Vocabulary
    from data.words import WordVocabulary


class DataSet(ABC):
    """A data set as the configuration names it.

    After prepare():
        train        Source
        valid, test  Source, or None where there is no such split or it is smaller than one sample
        description  one line: what it is, and how much of it in each split
    From the start:
        vocabulary   how text becomes tokens and tokens text (GPT2Vocabulary or WordVocabulary); None for data that is
                     not language, and for tokens of an unknown vocabulary
        vocab_size   number of distinct tokens; None for data that is not language, and before prepare() where the text
                     decides (words)
        seq_len      tokens per sample; None for data that is not language
        num_workers  processes that read ahead (see data.loader.train_loader)
        changing_shapes  whether training batches differ in shape from step to step (see data.buckets)
    """

    vocabulary: GPT2Vocabulary | WordVocabulary | None = None
    vocab_size: int | None = None
    seq_len: int | None = None
    changing_shapes: bool = False
    train: Source
    valid: Source | None
    test: Source | None
    description: str

    def __init__(self, num_workers: int = 0):
        """Raises DataError if `num_workers` is negative."""
        if num_workers < 0:
            raise DataError(f"data.num_workers={num_workers}: processes that read ahead must be 0 or more")
        self.num_workers = num_workers

    @abstractmethod
    def prepare(self) -> None:
        """Checks the data and builds caches. Called by the launching process, then by every worker.

        Cheap once the cache is there, and does nothing the second time. Raises DataError with the way out.
        """
