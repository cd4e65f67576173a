"""Rows that documents share: which documents fill each row, and the tokens of rows (``data.packing``).

Documents are packed by best fit decreasing, as trl's ``packing`` does, but over the whole split: the longest first,
each into the fullest row that has room for it. Documents of one length, and rows with equal room, need not be
distinguished to decide that, so all of them take one step.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from data.cache import MappedFile, cached_folder, key_of
from data.dataset import PADDING_TARGET, Source, by_part

Packing = Literal[False, True, "split", "whole"]
_SCANNED = 1 << 24  # tokens at a time


def best_fit(counts: np.ndarray, room: int) -> np.ndarray:
    """Put documents into rows of ``room`` positions, the longest first, each into the fullest row that has room.

    Args:
        counts: The number of documents of each length in positions, [room + 1]; there are none of length 0.
        room: The positions of a row.

    Returns:
        The row of each document, from the longest to the shortest, int64.
    """
    free: list[tuple[int, int, int]] = []  # sorted: the positions that are left in each row from begin to end
    chosen, made = [np.empty(0, np.int64)], 0
    for length in range(room, 0, -1):
        count = int(counts[length])
        while count:
            at = bisect_left(free, (length,))
            new = room, made, made - -count // (room // length)
            left, begin, end = free.pop(at) if at < len(free) else new
            made, each = max(made, end), left // length
            taken = min(count, (end - begin) * each)
            chosen.append(begin + np.arange(taken) // each)
            full, some = begin + taken // each, taken % each
            used = full + (some > 0)
            for part in (left - each * length, begin, full), (left - some * length, full, used), (left, used, end):
                if part[0] and part[1] < part[2]:
                    insort(free, part)
            count -= taken
    return np.concatenate(chosen)


class PackedRows(Source):
    """Rows that are filled with documents. A document of n + 1 tokens fills n positions.

    Attributes:
        described: How many documents there are, and how full the rows are.
    """

    def __init__(self, documents: Any, seq_len: int, split: bool, cache_dir: str | os.PathLike | None):
        """Choose the documents of each row of ``seq_len`` positions, unless the cache has them.

        Args:
            documents: Documents by number: a ``Stream``, or ``data.jsonl.BucketedRows``.
            seq_len: The positions of a row.
            split: Whether a longer document is cut into pieces, so that every token but its first is a target once.
                Otherwise only its beginning is used.
            cache_dir: See data.cache.cached_folder.
        """
        self.documents, self.seq_len, self._most = documents, seq_len, None if split else seq_len + 1

        def build(folder: Path) -> None:
            lengths = np.maximum(documents.lengths(np.arange(len(documents))), 0)
            pieces = -(-lengths // seq_len) if split else (lengths > 0).astype(np.int64)
            numbers = np.repeat(np.arange(len(lengths)), pieces)
            starts = seq_len * (np.arange(len(numbers)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
            sizes = np.minimum(lengths[numbers] - starts, seq_len)
            rows = best_fit(np.bincount(sizes, minlength=seq_len + 1), seq_len)
            order = np.argsort(-sizes, kind="stable")[np.argsort(rows, kind="stable")]
            np.stack([numbers, starts], 1)[order].tofile(folder / "pieces")
            np.cumsum([0, *np.bincount(rows)]).tofile(folder / "rows")
            sizes.sum(keepdims=True).tofile(folder / "filled")

        folder = cached_folder(cache_dir, f"packed-{key_of(*documents.key, seq_len, split)}", build)
        pieces, self._rows, filled = (MappedFile(folder / name, "int64") for name in ("pieces", "rows", "filled"))
        self._pieces, share = pieces, filled.array[0] / max(1, len(self) * seq_len)
        self.described = f"{pieces.count // 2:,} {'pieces of ' * split}documents, rows {share:.1%} filled"

    def __len__(self) -> int:
        return self._rows.count - 1

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets, and where the document of each token begins, all int64 [b, seq_len]."""
        pieces, rows = self._pieces.array.reshape(-1, 2), self._rows.array
        mine = [pieces[rows[index] : rows[index + 1]] for index in indices]
        read = iter(self.documents.tokens(np.concatenate(mine)[:, 0], self._most))
        inputs = np.full((len(mine), self.seq_len), self.documents.end, np.int64)
        targets, begins = np.full_like(inputs, PADDING_TARGET), np.zeros_like(inputs)
        for row, starts in enumerate(mine):
            at = 0
            for start, (whole, counted) in zip(starts[:, 1].tolist(), read, strict=False):
                tokens = np.asarray(whole[start : start + self.seq_len + 1])
                end = at + len(tokens) - 1
                inputs[row, at:end] = tokens[:-1]
                targets[row, at:end] = np.where(counted[start : start + len(tokens)], tokens, PADDING_TARGET)[1:]
                begins[row, at:end], at = at, end
            begins[row, at:] = at  # the padding is one more document
        return torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(begins)


class Stream:
    """The documents in files of tokens. Each ends with a token ``end``, or with its file."""

    def __init__(
        self,
        files: Sequence[MappedFile],
        end: Any,
        cache_dir: Any,
        check: Callable[..., Any] = lambda path, tokens: None,
    ):
        """Find the ends of documents, unless the cache has them. ``check`` gets all tokens."""
        self.files, self.end, self._starts = files, end, np.cumsum([0, *(file.count for file in files)])
        self.key = [end, *((str(f.path), f.offset, f.count, f.path.stat().st_ctime_ns) for f in files)]

        def build(folder: Path) -> None:
            with open(folder / "ends", "wb") as ends:
                for file, first in zip(files, self._starts.tolist(), strict=False):
                    for start in range(0, file.count, _SCANNED):
                        some = file.array[start : start + _SCANNED]
                        check(file.path, some)
                        found = some == end
                        found[-1] |= start + len(some) == file.count
                        ends.write((np.flatnonzero(found) + (first + start + 1)).tobytes())

        self._ends = MappedFile(cached_folder(cache_dir, f"documents-{key_of(*self.key)}", build) / "ends", "int64")

    def __len__(self) -> int:
        return self._ends.count

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of positions of each document: its tokens without the last, which is only a target."""
        return np.diff(self._ends.array, prepend=0)[numbers] - 1

    def tokens(self, numbers: np.ndarray, most: int | None) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return at most ``most`` tokens of each document, as views of the files, and that all of them count."""
        read: list[Any] = [None] * len(numbers)
        begins = np.where(numbers > 0, self._ends.array[numbers - 1], 0)
        for part, mine in by_part(self._starts, begins):
            for i in mine.tolist():
                start, end = (int(x) - int(self._starts[part]) for x in (begins[i], self._ends.array[numbers[i]]))
                view = self.files[part].array[start:end][:most]
                read[i] = view, np.broadcast_to(True, len(view))
        return read
