"""The published way to read a text in order: columns that are read side by side, a window at a time."""

from __future__ import annotations

import os

import numpy as np

from common.errors import DataError
from data.tokens import TokenFile, TokenWindows


class ColumnWindows(TokenWindows):
    """Samples of T = seq_len tokens, cut from C columns: the text as C equal, contiguous parts of L tokens.

    Sample w*C + c is window w of column c: its inputs are tokens[c*L + w*T : c*L + w*T + T], its targets the
    token that follows each. A column has (L - 1) // T windows; a rest at its end is left out. Taken in order
    in global batches of C, batch w goes on in each column where batch w - 1 ended, and the replicas share
    the columns.

    Source: batchify and get_batch in PyTorch's tutorial "Language Modeling with nn.Transformer".
    """

    ordered = True

    def __init__(self, tokens: str | os.PathLike | TokenFile | np.ndarray, columns: int, seq_len: int):
        """tokens: see TokenWindows.

        Raises DataError if a column has fewer than seq_len + 1 tokens, or `columns` is not positive.
        """
        if columns < 1:
            raise DataError(f"data.columns={columns}: a text is cut into at least 1 column")
        super().__init__(tokens, seq_len)
        self.columns = columns
        if self.column_length <= seq_len:
            raise DataError(
                f"{self.origin} has {len(self.tokens):,} tokens, {self.column_length:,} in each of "
                f"data.columns={columns}; one sample of data.seq_len={seq_len} needs {seq_len + 1}. Lower "
                "data.seq_len or data.columns (by default train.global_batch_size), or give more text"
            )

    @property
    def column_length(self) -> int:
        """Tokens in each column."""
        return len(self.tokens) // self.columns

    def __len__(self) -> int:
        return self.columns * ((self.column_length - 1) // self.seq_len)

    def starts(self, indices: np.ndarray) -> np.ndarray:
        window, column = np.divmod(indices, self.columns)
        return column * self.column_length + window * self.seq_len

    def check_batch(self, global_batch_size: int) -> None:
        if global_batch_size != self.columns:
            raise DataError(
                f"data.batchify=true reads data.columns={self.columns} columns side by side, and "
                f"train.global_batch_size={global_batch_size} must be the same number; leave data.columns out "
                "and it is"
            )
