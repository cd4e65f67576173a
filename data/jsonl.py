"""JSON lines: one sample per row, the text of one or several fields in GPT-2's vocabulary."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import DataError
from common.files import expand_home
from common.machine import usable_cores
from data.cache import MappedFile, cached_folder
from data.dataset import DataSet, Source, check_at_least, once
from data.documents import find_files
from data.loader import VariableLength, bucket_widths
from data.rows import Rows
from data.vocabulary import END_OF_TEXT, ExtraTokens, GPT2Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

_CHECK_ALL, _CHECK_SOME = 1_000_000, 10_000
PERIOD = 20
PADDING_TARGET = -100  # torch's ignore_index: such a target does not count in the loss
_LENGTHS = "tokens.uint32"
_VALID, _TEST = 9, 19
_WORDS = {"train": "train", "test": "test", **dict.fromkeys(("valid", "validation", "val", "dev"), "valid")}


class Jsonl(DataSet):
    """A file or a folder of *.jsonl files, each row a JSON object that holds its text in one or several fields.

    A sample is a row's tokens and <|endoftext|>, cut to seq_len + 1 tokens, as inputs and as targets shifted by one,
    padded with <|endoftext|> and with targets that do not count.

    Splits: files in a folder whose path says valid (validation, val, dev) or test are these splits, all others are for
    training. Without a valid file the 10th of every 20 training rows goes to valid; without a test file as well, the
    20th to test.

    Rows are read and encoded when they are needed, by an index on the disk (see data.rows). prepare() checks up to 1
    million rows once; of more rows it checks 10,000, evenly spread, and the others as they are trained on.
    """

    def __init__(
        self,
        root: str | None = None,
        field: str | list[str] = "text",
        seq_len: int = 256,
        bucket_by_length: bool = False,
        cache_dir: str | None = None,
        num_workers: int = 0,
        extra_tokens: ExtraTokens = None,
    ):
        super().__init__(num_workers)
        if not root:
            raise DataError("data=jsonl needs to know which rows: data.root=FILE_OR_FOLDER")
        check_at_least(1, seq_len=seq_len)
        self.fields = [field] if isinstance(field, str) else field
        if not _are_names(self.fields):
            raise DataError(f"data.field={field}: give a name or a list of names, as data.field=[question,answer]")
        self.fields = list(self.fields)
        self.root = expand_home(root).absolute()
        self.vocabulary = GPT2Vocabulary(extra_tokens)
        self.vocab_size = self.vocabulary.size
        self.seq_len = seq_len
        self.changing_shapes = bucket_by_length
        self.cache_dir = cache_dir

    @once
    def prepare(self) -> None:
        """Build the index, check rows and count tokens, unless the cache says that it was done before."""
        files = split_files(self.root)
        rows = {split: Rows(paths, self.cache_dir) for split, paths in files.items()}
        for part in rows.values():
            self._check(part)
        taken = {"valid": _VALID} if "valid" not in rows else {}
        if rows.keys() == {"train"}:
            taken["test"] = _TEST
        kept = tuple(i for i in range(PERIOD) if i not in taken.values())
        train = RowSelection(len(rows["train"]), kept)
        if self.changing_shapes:
            counts = cached_counts(rows["train"], self.fields, self.vocabulary, self.cache_dir)
            self.train = BucketedRows(counts, rows["train"], train, self.fields, self.vocabulary, self.seq_len)
        else:
            self.train = TokenRows(rows["train"], train, self.fields, self.vocabulary, self.seq_len)
        self.valid, self.test = self._held_out("valid", rows, taken), self._held_out("test", rows, taken)
        self.description = self._describe()

    def _held_out(self, split: str, rows: dict[str, Rows], taken: dict[str, int]) -> TokenRows | None:
        if split in rows:
            part, selection = rows[split], RowSelection(len(rows[split]), tuple(range(PERIOD)))
        elif split in taken:
            part, selection = rows["train"], RowSelection(len(rows["train"]), (taken[split],))
        else:
            return None
        return TokenRows(part, selection, self.fields, self.vocabulary, self.seq_len) if len(selection) else None

    def _check(self, rows: Rows) -> None:
        def check(folder: Path) -> None:
            if len(rows) <= _CHECK_ALL:
                for _ in rows.texts_in_order(self.fields):
                    pass
            else:
                for indices in np.array_split(np.linspace(0, len(rows) - 1, _CHECK_SOME, dtype=np.int64), 100):
                    rows.texts(indices, self.fields)

        # An empty folder in the cache says that the rows were checked.
        cached_folder(self.cache_dir, f"checked-{key_of(rows, self.fields)}", check, timeout_s=rows.patience_s)

    def _describe(self) -> str:
        splits = (("train", self.train), ("valid", self.valid), ("test", self.test))
        parts = [f"{split} {len(source) if source else 0:,} rows" for split, source in splits]
        widths = self.train.widths if isinstance(self.train, BucketedRows) else (self.seq_len,)
        padded = f"padded to {' or '.join(map(str, widths))} tokens"
        return f"JSON lines of {self.root}, {self.vocabulary.label}: {', '.join(parts)}, {padded}"


def split_files(root: Path) -> dict[str, list[Path]]:
    """Return the files of "train" and, where their paths say so, of "valid" and "test"."""
    if not root.exists():
        raise DataError(f"data.root={root} does not exist; give a file of JSON lines or a folder of *.jsonl files")
    if not root.is_dir():
        if root.stat().st_size == 0:
            raise DataError(f"data.root={root} is empty; give a file of JSON lines")
        return {"train": [root]}
    files = find_files(root, suffix=".jsonl")
    if not files:
        raise DataError(f"data.root={root} holds no *.jsonl file that is not empty; give a folder that does")
    splits: dict[str, list[Path]] = {}
    for path in files:
        words = re.findall("[a-z]+", str(path.relative_to(root)).lower())
        said = [_WORDS[word] for word in words if word in _WORDS]
        splits.setdefault(said[-1] if said else "train", []).append(path)
    if "train" not in splits:
        names = ", ".join(path.name for path in files[:5])
        raise DataError(
            f"data.root={root} has nothing to train on: by their names all files are for validation or testing "
            f"({names}). Rename one, or give a file by data.root=FILE"
        )
    return splits


def _are_names(fields: object) -> bool:
    try:
        names = list(fields)
    except TypeError:
        return False
    return bool(names) and all(isinstance(name, str) and name for name in names)


@dataclass(frozen=True)
class RowSelection:
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
        """Return which rows some samples are: int64 of the shape of ``indices``, which are in [0, len)."""
        period, place = np.divmod(np.asarray(indices, dtype=np.int64), len(self.kept))
        return period * PERIOD + np.asarray(self.kept)[place]


class TokenRows(Source):
    """Language-model samples, one per row."""

    def __init__(
        self, rows: Rows, selection: RowSelection, fields: Sequence[str], vocabulary: GPT2Vocabulary, seq_len: int
    ):
        self.rows, self.selection, self.fields = rows, selection, fields
        self.vocabulary, self.seq_len = vocabulary, seq_len

    def __len__(self) -> int:
        return len(self.selection)

    def read(self, indices: np.ndarray, epoch: int, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both int64 [b, width]; ``width`` is seq_len where it is None."""
        import torch

        texts = self.rows.texts(self.selection.row(indices), self.fields)
        shape = (len(texts), width or self.seq_len)
        inputs, targets = np.full(shape, END_OF_TEXT, np.int64), np.full(shape, PADDING_TARGET, np.int64)
        for i, encoded in enumerate(self.vocabulary.encode_texts(texts)):
            tokens = [*encoded, END_OF_TEXT][: shape[1] + 1]
            inputs[i, : len(tokens) - 1] = tokens[:-1]
            targets[i, : len(tokens) - 1] = tokens[1:]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class BucketedRows(TokenRows, VariableLength):
    """TokenRows whose batches can be narrower than seq_len; ``counts`` has the tokens of every row."""

    def __init__(self, counts: MappedFile, rows: Rows, selection: RowSelection, *more: Any):
        super().__init__(rows, selection, *more)
        self.widths, self.counts = bucket_widths(self.seq_len), counts

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the positions filled: the tokens of a row less the last, which is only a target."""
        return np.minimum(self.counts.array[self.selection.row(indices)].astype(np.int64) - 1, self.seq_len)


def cached_counts(
    rows: Rows, fields: Sequence[str], vocabulary: GPT2Vocabulary, cache_dir: str | os.PathLike | None
) -> MappedFile:
    """Return how many tokens each row has, uncut, the closing <|endoftext|> included."""
    threads = min(4, usable_cores())

    def build(folder: Path) -> None:
        with open(folder / _LENGTHS, "wb") as file:
            for texts in rows.texts_in_order(fields):
                encoded = vocabulary.encode_texts(texts, threads)
                file.write(np.array([len(tokens) + 1 for tokens in encoded], dtype=np.uint32).tobytes())

    name = f"lengths-{key_of(rows, [*fields, vocabulary.key])}"
    return MappedFile(cached_folder(cache_dir, name, build, rows.patience_s) / _LENGTHS, "uint32")


def key_of(rows: Rows, words: Sequence[str]) -> str:
    """Return a hash that names in the cache what was made of rows, and the words that it depends on besides."""
    return hashlib.sha256(json.dumps([rows.key, *words]).encode()).hexdigest()[:16]
