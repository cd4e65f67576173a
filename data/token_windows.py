"""Tokens on the disk, in one memory-mapped file of integers per split, and the samples that are cut from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.errors import DataError
from data.cache import MappedFile, cached_folder
from data.dataset import Source, check_at_least

_MOST_COUNTED = 1 << 24


def cached_tokens(
    cache_dir: str | os.PathLike | None,
    name: str,
    encode: Callable[[Path], tuple[int, Mapping[str, Iterable[np.ndarray]]]],
) -> dict[str, MappedFile]:
    """Return the tokens of each split, which the first process that needs them writes (see data.cache).

    The files are raw integers in this machine's byte order; their suffix (.uint16, .uint32) is their dtype.

    Args:
        cache_dir: See data.cache.cached_folder.
        name: The name of the content, with a hash of the text, the vocabulary and the format of the cache.
        encode: Returns the size of the vocabulary, and each split's tokens as arrays, which are written in turn. It may
            write further files into the folder with which it is called.
    """

    def build(folder: Path) -> None:
        vocab_size, splits = encode(folder)
        dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        for split, arrays in splits.items():
            with open(folder / f"{split}.{dtype}", "wb") as file:
                for array in arrays:
                    file.write(array.astype(dtype).tobytes())

    folder = cached_folder(cache_dir, f".{name}", build)  # hidden: the cache may be in a folder of texts
    return {path.stem: MappedFile(path, path.suffix[1:]) for path in folder.glob("*.uint*")}


def unigram_entropy(tokens: np.ndarray) -> float:
    """Return the entropy of tokens [n], in nats, which is the loss of a model that only knows their frequencies.

    Only the first 2^24 tokens are counted.
    """
    counts = np.bincount(tokens[:_MOST_COUNTED])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


class TokenWindows(Source):
    """Language-model samples of T = seq_len tokens: consecutive parts of a sequence of n tokens.

    Sample i has the inputs tokens[i*T : i*T + T] and as targets the token that follows each. There are therefore
    (n - 1) // T samples, and every token except for the first and a remainder at the end is predicted exactly once.
    """

    def __init__(self, file: MappedFile, seq_len: int):
        self.file, self.seq_len = file, seq_len

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, [n]."""
        return self.file.array

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """Return the position of each sample's first token, int64 [b]."""
        return indices * self.seq_len

    def windows(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of samples and the token after each sample, int64 [b, seq_len + 1]."""
        starts = self.starts(np.asarray(indices, dtype=np.int64))
        return self.tokens[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both int64 [b, seq_len]."""
        return shifted(self.windows(indices))


def shifted(windows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets, both [b, T], of tokens [b, T + 1]."""
    samples = torch.from_numpy(windows)
    # Two copies instead of two views, since pinning or sending a view would copy the other's tokens as well.
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


class ColumnWindows(TokenWindows):
    """Samples of T = seq_len tokens from C columns: the text as C equal, contiguous parts of L tokens.

    Sample w*C + c is window w of column c: its inputs are tokens[c*L + w*T : c*L + w*T + T], its targets the token
    that follows each. A column has (L - 1) // T windows; a remainder at its end is left out. If the samples are used in
    order in global batches of C, batch w continues each column where batch w - 1 ended, and the replicas share the
    columns.

    Source: batchify and get_batch in PyTorch's tutorial "Language Modeling with nn.Transformer".
    """

    ordered = True

    def __init__(self, file: MappedFile, columns: int, seq_len: int):
        """Use tokens as TokenWindows does. ``columns`` is the global batch size.

        Raises:
            DataError: If a column has fewer than seq_len + 1 tokens, or ``columns`` is not positive.
        """
        check_at_least(1, columns=columns)
        super().__init__(file, seq_len)
        self.columns, self.column_length = columns, len(self.tokens) // columns
        if self.column_length <= seq_len:
            raise DataError(
                f"{self.file.path} has {len(self.tokens):,} tokens, {self.column_length:,} in each of "
                f"data.columns={columns}; one sample of data.seq_len={seq_len} needs {seq_len + 1}. Lower "
                "data.seq_len or data.columns (by default train.global_batch_size), or give more text"
            )

    def __len__(self) -> int:
        return self.columns * ((self.column_length - 1) // self.seq_len)

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """See TokenWindows."""
        window, column = np.divmod(indices, self.columns)
        return column * self.column_length + window * self.seq_len

    def check_batch(self, global_batch_size: int) -> None:
        """Raise DataError unless the global batch has one sample of each column."""
        if global_batch_size != self.columns:
            raise DataError(
                f"data.batchify=true reads data.columns={self.columns} columns side by side, but "
                f"train.global_batch_size={global_batch_size} must be the same number. Leave out data.columns"
            )
