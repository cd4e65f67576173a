"""Tokens on disk: one memory-mapped file of integers per split, and the samples cut from it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.cache import cached_folder
from data.errors import DataError
from data.source import Source

if TYPE_CHECKING:
    from torch import Tensor

_COUNTS = "tokens.json"


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every token of the vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def cached_tokens(
    cache_dir: str | os.PathLike | None,
    name: str,
    vocab_size: int,
    splits: Callable[[], Mapping[str, Iterable[np.ndarray]]],
) -> dict[str, Path]:
    """The token file of each split, built by the first process that asks for it (see data.cache).

    name:   names the content: it carries a hash of the text, the vocabulary and the format of the cache
    splits: gives each split's tokens as arrays, which are written one after the other as they come
    The files are raw integers in this machine's byte order; their suffix (.uint16, .uint32) is their dtype.
    Raises DataError if the cache cannot be written or is built by another process for too long.
    """
    dtype = token_dtype(vocab_size)

    def build(folder: Path) -> None:
        counts = {}
        for split, arrays in splits().items():
            counts[split] = 0
            with open(folder / f"{split}.{dtype}", "wb") as file:
                for array in arrays:
                    file.write(array.astype(dtype).tobytes())
                    counts[split] += array.size
        (folder / _COUNTS).write_text(json.dumps(counts))

    def files(folder: Path) -> dict[str, Path]:
        return {split: folder / f"{split}.{dtype}" for split in json.loads((folder / _COUNTS).read_text())}

    def intact(folder: Path) -> bool:
        try:
            counts = json.loads((folder / _COUNTS).read_text())
            return all(path.stat().st_size == counts[s] * dtype.itemsize for s, path in files(folder).items())
        except (OSError, ValueError):
            return False

    return files(cached_folder(cache_dir, name, build, intact))


def count_tokens(path: Path) -> int:
    """The number of tokens in a file that cached_tokens wrote."""
    return path.stat().st_size // np.dtype(path.suffix[1:]).itemsize


class TokenWindows(Source):
    """Language-model samples of T = seq_len tokens, cut one after the other from a row of n tokens.

    Sample i has inputs tokens[i*T : i*T + T] and as targets the token that follows each; so there are
    (n - 1) // T samples, and every token but the first and a rest at the end is predicted exactly once.
    """

    def __init__(self, tokens: str | os.PathLike | np.ndarray, seq_len: int):
        """tokens: a file whose suffix is its dtype (tokens.uint16), or a one-dimensional array of integers.

        Raises DataError if there are not seq_len + 1 tokens.
        """
        self.path = None if isinstance(tokens, np.ndarray) else Path(tokens)
        self.seq_len = seq_len
        count = len(tokens) if self.path is None else count_tokens(self.path)
        if count < seq_len + 1:
            raise DataError(
                f"{self.path or 'the data'} has {count} tokens; one sample of data.seq_len={seq_len} needs "
                f"{seq_len + 1}. Lower data.seq_len or give more text"
            )
        self.tokens = _map(self.path) if self.path is not None else tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 [b, seq_len]."""
        import torch

        starts = np.asarray(indices, dtype=np.int64)[:, None] * self.seq_len
        windows = self.tokens[starts + np.arange(self.seq_len + 1)].astype(np.int64)
        samples = torch.from_numpy(windows)
        # Two contiguous tensors, not two views: pinning and sending a view would copy the other's tokens as
        # well.
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def __getstate__(self) -> dict:
        # A started (not forked) loader process maps the file again; pickling the map would copy all the
        # tokens.
        return self.__dict__ | ({"tokens": None} if self.path is not None else {})

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        if self.path is not None:
            self.tokens = _map(self.path)


def _map(path: Path) -> np.ndarray:
    return np.memmap(path, dtype=np.dtype(path.suffix[1:]), mode="r")
