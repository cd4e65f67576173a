"""Tokens on disk: one memory-mapped file of integers per split, and the samples cut from it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import DataError
from data.cache import cached_folder
from data.source import Source

if TYPE_CHECKING:
    from torch import Tensor

_SIZES = "tokens.json"


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every token of the vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def cached_tokens(
    cache_dir: str | os.PathLike | None,
    name: str,
    encode: Callable[[Path], tuple[int, Mapping[str, Iterable[np.ndarray]]]],
) -> dict[str, Path]:
    """The token file of each split, built by the first process that asks for it (see data.cache).

    name:   names the content: it carries a hash of the text, the vocabulary and the format of the cache
    encode: gives the size of the vocabulary, and each split's tokens as arrays, which are written one after
            the other as they come; in the folder that it is given it may leave files of its own beside them
    The files are raw integers in this machine's byte order; their suffix (.uint16, .uint32) is their dtype.
    Raises DataError if the cache cannot be written or is built by another process for too long.
    """

    def build(folder: Path) -> None:
        vocab_size, splits = encode(folder)
        dtype = token_dtype(vocab_size)
        for split, arrays in splits.items():
            with open(folder / f"{split}.{dtype}", "wb") as file:
                for array in arrays:
                    file.write(array.astype(dtype).tobytes())
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        (folder / _SIZES).write_text(json.dumps(sizes))

    def intact(folder: Path) -> bool:
        try:
            sizes = json.loads((folder / _SIZES).read_text())
            return all((folder / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError):
            return False

    folder = cached_folder(cache_dir, name, build, intact)
    return {path.stem: path for path in folder.glob("*.uint*")}


@dataclass(frozen=True)
class TokenFile:
    """`count` tokens of `dtype` in a file, from the byte `offset` on."""

    path: Path
    dtype: str
    offset: int
    count: int

    @classmethod
    def whole(cls, path: str | os.PathLike) -> TokenFile:
        """A file that cached_tokens wrote."""
        path = Path(path)
        return cls(path, path.suffix[1:], 0, count_tokens(path))

    def map(self) -> np.ndarray:
        """The tokens, mapped: read from the disk when they are looked at."""
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.count,))


def count_tokens(path: Path) -> int:
    """The number of tokens in a file that cached_tokens wrote."""
    return path.stat().st_size // np.dtype(path.suffix[1:]).itemsize


class TokenWindows(Source):
    """Language-model samples of T = seq_len tokens, cut one after the other from a row of n tokens.

    Sample i has inputs tokens[i*T : i*T + T] and as targets the token that follows each; so there are
    (n - 1) // T samples, and every token but the first and a rest at the end is predicted exactly once.
    """

    def __init__(self, tokens: str | os.PathLike | TokenFile | np.ndarray, seq_len: int):
        """tokens: a file whose suffix is its dtype (tokens.uint16), a TokenFile, or a one-dimensional array.

        Raises DataError if there are not seq_len + 1 tokens.
        """
        self.seq_len = seq_len
        if isinstance(tokens, np.ndarray):
            self.file, self.tokens = None, tokens
        else:
            self.file = tokens if isinstance(tokens, TokenFile) else TokenFile.whole(tokens)
        count = len(tokens) if self.file is None else self.file.count
        if count <= seq_len:
            raise DataError(
                f"{self.origin} has {count} tokens; one sample of data.seq_len={seq_len} needs {seq_len + 1}. "
                "Lower data.seq_len or give more text"
            )
        if self.file is not None:  # only now: an empty file cannot be mapped
            self.tokens = self.file.map()

    @property
    def origin(self) -> str:
        """Where the tokens are from, for an error."""
        return str(self.file.path) if self.file is not None else "the data"

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """The position of each sample's first token, int64 [b]."""
        return indices * self.seq_len

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 [b, seq_len]."""
        import torch

        starts = self.starts(np.asarray(indices, dtype=np.int64))
        windows = self.tokens[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)
        samples = torch.from_numpy(windows)
        # Two contiguous tensors, not two views: pinning and sending a view would copy the other's tokens as
        # well.
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def __getstate__(self) -> dict:
        # A started (not forked) loader process maps the file again; pickling the map would copy all the
        # tokens.
        return self.__dict__ | ({"tokens": None} if self.file is not None else {})

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        if self.file is not None:
            self.tokens = self.file.map()
