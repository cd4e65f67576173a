"""Rows of text as language-model samples, all of one width or in batches of few widths."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.machine import usable_cores
from data.buckets import VariableLength, bucket_widths
from data.cache import cached_folder
from data.dataset import Source
from data.rows import Rows
from data.vocabulary import END_OF_TEXT, GPT2Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

PERIOD = 20
PADDING_TARGET = -100  # torch's ignore_index: such a target does not count in the loss
_LENGTHS = "tokens.uint32"
# How slow four threads may be at encoding before processes that wait for them give up.
_SLOWEST_ENCODED_BYTES_PER_S = 0.5e6


@dataclass(frozen=True)
class Share:
    """A fixed part of every 20 rows, by arithmetic instead of a list.

    Attributes:
        rows: The number of all rows.
        kept: Which of every 20 rows, in ascending order, each in [0, 20).
    """

    rows: int
    kept: tuple[int, ...]

    def __len__(self) -> int:
        whole, rest = divmod(self.rows, PERIOD)
        return whole * len(self.kept) + sum(place < rest for place in self.kept)

    def row(self, indices: np.ndarray) -> np.ndarray:
        """Returns which rows some samples are: int64 of the shape of ``indices``, which are in [0, len)."""
        period, place = np.divmod(np.asarray(indices, dtype=np.int64), len(self.kept))
        return period * PERIOD + np.asarray(self.kept)[place]


class TokenRows(Source):
    """Language-model samples, one per row."""

    def __init__(
        self, rows: Rows, share: Share, fields: Sequence[str], vocabulary: GPT2Vocabulary, seq_len: int
    ):
        self.rows, self.share, self.fields, self.vocabulary, self.seq_len = rows, share, fields, vocabulary, seq_len

    def __len__(self) -> int:
        return len(self.share)

    def read(self, indices: np.ndarray, epoch: int, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, both int64 [b, width].

        Args:
            indices: int64 [b].
            epoch: Makes no difference.
            width: Positions per sample; None for seq_len.

        Raises:
            DataError: A row is without its text. It names the file and the line.
        """
        import torch

        texts = self.rows.texts(self.share.row(indices), self.fields)
        shape = (len(texts), width or self.seq_len)
        inputs, targets = np.full(shape, END_OF_TEXT, np.int64), np.full(shape, PADDING_TARGET, np.int64)
        for i, encoded in enumerate(self.vocabulary.encode_texts(texts)):
            tokens = [*encoded, END_OF_TEXT][: shape[1] + 1]
            inputs[i, : len(tokens) - 1] = tokens[:-1]
            targets[i, : len(tokens) - 1] = tokens[1:]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class BucketedRows(TokenRows, VariableLength):
    """TokenRows whose batches can be narrower than seq_len."""

    def __init__(
        self,
        rows: Rows,
        share: Share,
        fields: Sequence[str],
        vocabulary: GPT2Vocabulary,
        seq_len: int,
        counts: Path,
    ):
        """The arguments are those of TokenRows, and ``counts``, the file of cached_counts."""
        super().__init__(rows, share, fields, vocabulary, seq_len)
        self.widths = bucket_widths(seq_len)
        self.path = counts
        self._map()

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Returns the positions filled: the tokens of a row less the last, which is only a target."""
        return np.minimum(self.counts[self.share.row(indices)].astype(np.int64) - 1, self.seq_len)

    def _map(self) -> None:
        self.counts = np.memmap(self.path, dtype=np.uint32, mode="r")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"counts": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._map()


def cached_counts(
    rows: Rows, fields: Sequence[str], vocabulary: GPT2Vocabulary, cache_dir: str | os.PathLike | None
) -> Path:
    """Returns a file of how many tokens each row has (uint32), uncut, the closing <|endoftext|> included."""
    threads = min(4, usable_cores())

    def build(folder: Path) -> None:
        with open(folder / _LENGTHS, "wb") as file:
            for texts in rows.texts_in_order(fields):
                encoded = vocabulary.encode_texts(texts, threads)
                file.write(np.array([len(tokens) + 1 for tokens in encoded], dtype=np.uint32).tobytes())

    def intact(folder: Path) -> bool:
        path = folder / _LENGTHS
        return path.is_file() and path.stat().st_size == len(rows) * np.dtype(np.uint32).itemsize

    name = f"lengths-{key_of(rows, [*fields, vocabulary.key])}"
    patience = rows.patience_s(_SLOWEST_ENCODED_BYTES_PER_S)
    return cached_folder(cache_dir, name, build, intact, patience) / _LENGTHS


def key_of(rows: Rows, words: Sequence[str]) -> str:
    """Returns a hash that names in the cache what was made of rows, and the words that it depends on besides."""
    return hashlib.sha256(json.dumps([rows.key, *words]).encode()).hexdigest()[:16]
