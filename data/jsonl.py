"""JSON lines: one sample per row, the text of one or several fields, or a prompt and its answer.

Rows are found by an index on the disk, of 8 bytes per row, and are not kept in memory.
"""

from __future__ import annotations

import itertools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from common.errors import DataError
from common.machine import usable_cores
from data.cache import MappedFile, cached_folder, key_of
from data.dataset import PADDING_TARGET, Source, by_part, check_at_least, given_path, once
from data.documents import TO_UTF8, files_of, is_utf16, split_of
from data.folds import Folded, Part
from data.loader import VariableLength, bucket_widths
from data.packed import SUFFIXES, unpacked
from data.packing import PackedRows, Packing
from data.prompts import Pair, Row, RowProblem, RowTokens, is_chat
from data.seen_rows import SeenRows
from data.vocabulary import ExtraTokens, Vocabulary, choose_vocabulary

# Must be increased when the same files give another index, so that old indices are ignored and not misread.
_INDEX_FORMAT = 1
_INDEX = "offsets.int64"
_BLOCK_BYTES = 1 << 20
_NEWLINE, _SPACE = 10, 32
_CHECK_ALL, _CHECK_SOME = 1_000_000, 10_000
_ENCODE_BYTES = 4 << 20  # of the rows that are checked; encoding takes much longer than reading
_SEEN = "seen.json"
PERIOD = 20
CHATS = "data.messages="
# What to do with a file whose first line is not a row.
_TO_LINES = (
    "If the file is a JSON list, convert it: jq -c '.[]' OLD > NEW.jsonl; pandas writes lines by "
    "to_json(…, orient='records', lines=True). If it is a table (CSV, Arrow), write it as Parquet and type data=parquet"
)
_MARK = b"\xef\xbb\xbf \t"  # may stand before the first row
# Marks of the folder of a table that keeps older versions of its rows.
_TABLES = ("_delta_log", "metadata/*.metadata.json", ".hoodie")
_LENGTHS = "tokens.uint32"
_AT_A_TIME = 256  # the number of rows that are read at a time if all are read in order
_VALID, _TEST = 9, 19


class RowData(Folded):
    """A file or a folder of files of rows, each with its text in one or several fields.

    A sample is a row's tokens and the end token, cut to seq_len + 1 tokens, as inputs and as targets shifted by one,
    padded with the end token and with targets that do not count. With answers or chats (see RowTokens), only the tokens
    of answers count. A sample of pairs is the prompt with the chosen and with the rejected answer, [2, seq_len] each.

    Splits: files of a folder belong to the split that a word of their path names (data.documents.SPLITS), or else to
    training. If there is no valid file, the 10th of every 20 training rows goes to valid; if there is no test file
    either, the 20th goes to test.

    Rows are read and encoded when they are needed, by an index on the disk (see Rows). prepare() checks up to 1 million
    rows once, and renders up to 100,000 if there is a template. Of more rows it takes 10,000, evenly spread, and the
    others are checked when they are trained on.

    Attributes:
        rows_class: Finds and reads the rows of files, as Rows does.
        title: The kind of rows, for messages.
        suffix: The suffix of the files in a folder.
        packed: The further suffixes of compressed files.
        fields: The fields of a row's text. Their texts are joined by newlines.
    """

    rows_class: Callable[[Sequence[Path], str | None], RowFiles]
    title: str
    suffix: str
    packed: Sequence[str] = ()
    fields: list[str]
    vocabulary: Vocabulary
    seq_len: int

    def __init__(
        self,
        root: str | None = None,
        seq_len: int = 256,
        bucket_by_length: bool = False,
        extra_tokens: ExtraTokens = None,
        tokenizer: str | None = None,
        answer: str | None = None,
        template: str | None = None,
        messages: str | None = None,
        packing: Packing = False,
        chosen: str | None = None,
        rejected: str | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        if packing and (bucket_by_length or chosen):
            other = "data.bucket_by_length=true shortens" if bucket_by_length else f"data.chosen={chosen} pairs"
            raise DataError(f"data.packing fills rows, and {other} them; leave one out")
        self.packing, self._split = packing, packing == "split"
        self.root = given_path(root, f"data={self.suffix[1:]} needs the rows, data.root=FILE_OR_FOLDER")
        check_at_least(1, seq_len=seq_len)
        self.vocabulary = choose_vocabulary(tokenizer, extra_tokens)
        self.vocab_size = self.vocabulary.size
        self.seq_len, self.bucket_by_length = seq_len, bucket_by_length
        self.row_tokens = RowTokens(self.vocabulary, self.fields, answer, template, messages, chosen, rejected)
        self.pairs = self.row_tokens.pairs

    @once
    def prepare(self) -> None:
        """Build the index, check rows and count tokens, unless the cache shows that this was done before."""
        files = split_files(self.root, self.suffix, self.title, self.packed)
        rows = {split: self.rows_class(paths, self.cache_dir) for split, paths in files.items()}
        for part in rows.values():
            if not len(part):
                more = f" and {len(part.files) - 1} more files" if len(part.files) > 1 else ""
                raise DataError(f"{part.files[0]}{more}: there is no row; give a file of {self.title}")
        seen = {split: self._check(part) for split, part in rows.items()}
        selected: dict[str, Any] = select_rows({split: len(part) for split, part in rows.items()}, self.folds)
        if parts := self.parts(len(selected["train"])):
            rows.pop("valid", None)
            selected |= {split: replace(part, of=selected["train"]) for split, part in parts.items()}
        sources: dict[str, Any] = {
            split: TokenRows(rows.get(split, rows["train"]), part, self.row_tokens, self.seq_len)
            for split, part in selected.items()
        }
        if self.bucket_by_length:
            sources["train"] = BucketedRows(sources["train"], self.seq_len + 1, self.cache_dir)
        if self.packing:
            sources = {split: self._packed(source) for split, source in sources.items()}
        self.train, self.valid, self.test = sources["train"], sources["valid"] or None, sources["test"] or None
        self.description = self._describe(seen["train"]) + (f"; {self.dealt(parts)}" if parts else "")

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts to continue: of texts, or of prompts if rows have answers, as they are in rows."""
        return self.row_tokens.prompts(texts)

    def _check(self, rows: RowFiles) -> SeenRows:
        tokens, templated = self.row_tokens, self.row_tokens.template is not None
        most = _CHECK_ALL // 10 if templated else _CHECK_ALL

        def check(folder: Path) -> None:
            every, answered, seen = len(rows) <= most, False, SeenRows(len(rows))
            indices = np.arange(len(rows)) if every else np.linspace(0, len(rows) - 1, _CHECK_SOME, dtype=np.int64)
            encode_each = -(-rows.size * len(indices) // (len(rows) * _ENCODE_BYTES))

            def render(given: list) -> list:
                rendered = tokens.render(given)
                seen.add_messages(given if tokens.messages else [], tokens)
                return rendered

            for some in np.array_split(np.arange(len(indices)), -(-len(indices) // _AT_A_TIME)):
                if templated:
                    answered |= any(spans for _, spans in encoded_rows(rows, indices[some], tokens, render))
                else:
                    rows.read(indices[some], tokens)
                seen.add_lengths(encoded_rows(rows, indices[some[some % encode_each == 0]], tokens))
            if templated and not answered:
                roles = f" (there are {', '.join(seen.roles)})" * bool(seen.roles)
                raise DataError(
                    f"{rows.files[0]}: nothing would count in the loss, because no row has a message with the role "
                    f"assistant{roles}, or {tokens.named} writes them outside of its {{% generation %}} blocks; "
                    "correct one"
                )
            (folder / _SEEN).write_text(json.dumps(asdict(seen)))

        # A folder in the cache shows that the rows were checked, and its name for what.
        checked = (*tokens.fields, "JSON of whole characters, lengths, roles, keys", *tokens.key)
        folder = cached_folder(self.cache_dir, f"checked-{key_of(rows.key, *checked)}", check)
        return SeenRows(**json.loads((folder / _SEEN).read_bytes()))

    def _packed(self, source: TokenRows) -> PackedRows:
        documents = BucketedRows(source, None if self._split else self.seq_len + 1, self.cache_dir)
        return PackedRows(documents, self.seq_len, self._split, self.cache_dir)

    def _describe(self, seen: SeenRows) -> str:
        splits = (("train", self.train), ("valid", self.valid), ("test", self.test))
        parts = [f"{split} {len(source) if source else 0:,} rows" for split, source in splits]
        widths = self.train.widths if isinstance(self.train, BucketedRows) else (self.seq_len,)
        how = f"{self.train.described}, packed" if isinstance(self.train, PackedRows) else "padded"
        described = seen.describe(self.seq_len, " or ".join(map(str, widths)), how)
        return f"{self.title} of {self.root}, {self.vocabulary.label}: {', '.join(parts)}, {described}"


def names(key: str, given: str | list[str]) -> list[str]:
    """Return the names in an option, which is a name or a list of names; raise DataError if it has none."""
    listed = [given] if isinstance(given, str) else list(given)
    if not all(listed) or not listed:
        raise DataError(f"data.{key}={given}: give a name or a list of names, such as data.{key}=[question,answer]")
    return listed


def split_files(
    root: Path, suffix: str = ".jsonl", title: str = "JSON lines", packed: Sequence[str] = ()
) -> dict[str, list[Path]]:
    """Return the files of "train" and, by the words in their paths, of "valid" and "test"."""
    files = files_of(root, title, suffix, packed)
    if not root.is_dir():
        return {"train": files}
    for folder in {folder for path in files for folder in path.parents}:
        if any(any(folder.glob(mark)) for mark in _TABLES):
            raise DataError(
                f"{folder} is a table of Delta Lake, Iceberg or Hudi, whose files also have deleted rows. Write the "
                'others to a file, such as by polars: scan_delta(OLD).sink_parquet("rows.parquet"), or scan_iceberg '
                "instead"
            )
    splits: dict[str, list[Path]] = {}
    for path in files:
        splits.setdefault(split_of(path.relative_to(root)), []).append(path)
    if "train" not in splits:
        names = ", ".join(path.name for path in files[:5])
        raise DataError(
            f"data.root={root} has no files to train on: by their names all files are for validation or testing "
            f"({names}). Rename one, or give a file by data.root=FILE"
        )
    return splits


@dataclass(frozen=True)
class RowSelection:
    """A fixed part of every 20 rows, by arithmetic instead of a list.

    Attributes:
        rows: The number of all rows.
        kept: The rows that are kept of every 20 rows, in ascending order, each in [0, 20).
    """

    rows: int
    kept: tuple[int, ...]

    def __len__(self) -> int:
        whole, rest = divmod(self.rows, PERIOD)
        return whole * len(self.kept) + sum(offset < rest for offset in self.kept)

    def row(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows of some samples, int64 of the shape of ``indices``, which are in [0, len)."""
        period, number = np.divmod(np.asarray(indices, dtype=np.int64), len(self.kept))
        return period * PERIOD + np.asarray(self.kept, dtype=np.int64)[number]


def select_rows(sizes: dict[str, int], folds: int | None = None) -> dict[str, RowSelection]:
    """Return which rows are "train", "valid" and "test".

    Args:
        sizes: The number of rows of each split that has files; "train" must be one of them. Without "valid", the
            10th of every 20 training rows goes to valid; with "train" only, the 20th goes to test.
        folds: The number of folds; with folds, the rows that would go to valid stay in train.
    """
    taken = {} if folds or "valid" in sizes else {"valid": (_VALID,)}
    if sizes.keys() == {"train"}:
        taken["test"] = (_TEST,)
    kept = {split: tuple(range(PERIOD)) for split in sizes} | taken
    kept["train"] = tuple(i for i in range(PERIOD) if (i,) not in taken.values())
    return {s: RowSelection(sizes.get(s, sizes["train"]), kept.get(s, ())) for s in ("train", "valid", "test")}


class TokenRows(Source):
    """Language-model samples, one per row."""

    def __init__(self, rows: RowFiles, selection: RowSelection | Part, row_tokens: RowTokens, seq_len: int):
        self.rows, self.selection, self.row_tokens, self.seq_len = rows, selection, row_tokens, seq_len

    def __len__(self) -> int:
        return len(self.selection)

    def read(self, indices: np.ndarray, epoch: int, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both int64 [b, width], or [b, 2, width] for pairs; None: width seq_len."""
        shape = (len(indices) * (1 + self.row_tokens.pairs), width or self.seq_len)
        end = self.row_tokens.vocabulary.end
        inputs, targets = np.full(shape, end, np.int64), np.full(shape, PADDING_TARGET, np.int64)
        encoded = encoded_rows(self.rows, self.selection.row(indices), self.row_tokens, most=shape[1] + 1)
        for i, (tokens, counted) in enumerate(encoded):
            inputs[i, : len(tokens) - 1] = tokens[:-1]
            targets[i, : len(tokens) - 1] = np.where(counted, tokens, PADDING_TARGET)[1:]
        sides = (2,) * self.row_tokens.pairs
        inputs, targets = (x.reshape(len(indices), *sides, shape[1]) for x in (inputs, targets))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def ids(self, indices: np.ndarray) -> list | None:
        """Return the field ``id`` of rows, null where it is missing; None if the first row has none."""
        found = self.rows.ids(self.selection.row(np.append(0, indices)))
        return found[1:] if found[0] is not None else None


class BucketedRows(TokenRows, VariableLength):
    """TokenRows in batches that can be narrower than seq_len.

    Attributes:
        counts: The number of tokens of each row, of the longer one of a pair, with the end token, at most ``most``.
        key: Everything that determines the tokens, for the cache.
        end: The token that fills up rows.
    """

    def __init__(self, source: TokenRows, most: int | None, cache_dir: Any):
        """Count the tokens, unless the cache has the numbers."""
        rows, row_tokens, threads = source.rows, source.row_tokens, min(4, usable_cores())
        super().__init__(rows, source.selection, row_tokens, source.seq_len)

        def build(folder: Path) -> None:
            with open(folder / _LENGTHS, "wb") as file:
                for start in range(0, len(rows), _AT_A_TIME):
                    indices = np.arange(start, min(start + _AT_A_TIME, len(rows)))
                    encoded = encoded_rows(rows, indices, row_tokens, most=most, threads=threads)
                    counts = np.array([len(tokens) for tokens, _ in encoded], dtype=np.uint32)
                    file.write(counts.reshape(len(indices), -1).max(axis=1).tobytes())

        name = f"lengths-{key_of(rows.key, *row_tokens.key, str(most))}"
        self.counts = MappedFile(cached_folder(cache_dir, name, build) / _LENGTHS, "uint32")
        self.widths, self.end = bucket_widths(self.seq_len), row_tokens.vocabulary.end
        self.key = [name, str(self.selection)]

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of filled positions: the tokens of a row without the last, which is only a target."""
        return self.counts.array[self.selection.row(indices)].astype(np.int64) - 1

    def tokens(self, indices: np.ndarray, most: int | None) -> list[tuple[list[int], np.ndarray]]:
        """Return at most ``most`` tokens of each row, and which of them count in the loss."""
        return encoded_rows(self.rows, self.selection.row(indices), self.row_tokens, most=most)


def encoded_rows(
    rows: RowFiles, indices: np.ndarray, row_tokens: RowTokens, convert: Callable[..., list] | None = None, **how: Any
) -> list:
    """Read rows and convert them. By default, return the tokens of each row and which of them count in the loss.

    A pair is converted as two rows, the chosen answer first.

    Args:
        rows: The files.
        indices: The numbers of the rows, int [b].
        row_tokens: The form of rows.
        convert: A function of the rows, in place of RowTokens.encode.
        how: ``most`` and ``threads``: see RowTokens.encode.

    Raises:
        DataError: If a row cannot be read or encoded. The message has the file, the row and the reason.
    """
    read: list[Any] = rows.read(indices, row_tokens)
    if row_tokens.pairs:
        read = [row for pair in read for row in pair]
    try:
        return (convert or row_tokens.encode)(read, **how)
    except RowProblem as problem:
        raise DataError(f"{rows.name(indices[problem.index // (1 + row_tokens.pairs)])}: {problem}") from None


class RowFiles(ABC):
    """Files of rows. A file that changes after this object was made is an error when it is read.

    No file stays open between reads, so threads, forked and spawned processes can share the object, and the number of
    files is not limited.

    Attributes:
        files: The files.
        size: Their total size in bytes. Compressed files count with their content.
        key: A hash of the files and their state, for the cache.
        option: The option that names the fields of texts.
    """

    option: str

    def __init__(self, files: Sequence[Path], read: Sequence[Path] | None = None):
        """Record the state of files (absolute paths). ``read``: the unpacked files; None if none is packed."""
        self.files = list(files)
        self._read = self.files if read is None else list(read)
        self._stamps = [_stamp(os.stat(path)) for path in self._read]
        self.size = sum(size for size, _ in self._stamps)
        # With the time of the last change of any kind, since copies can keep size and st_mtime.
        changed = [os.stat(path).st_ctime_ns for path in self._read]
        self.key = key_of(_INDEX_FORMAT, list(zip(map(str, self._read), self._stamps, changed, strict=True)))

    @contextmanager
    def _open(self, number: int) -> Iterator[BinaryIO]:
        with open(self._read[number], "rb") as file:
            if _stamp(os.fstat(file.fileno())) != self._stamps[number]:
                raise DataError(f"{self.files[number]} has changed since it was indexed; start the run again")
            yield file

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def read(self, indices: np.ndarray, row_tokens: RowTokens) -> list[Row | Pair]:
        """Return the rows with these numbers, int [b], as RowTokens.take makes them.

        Raises:
            DataError: If a row has not all fields, or a value of another kind. The message has the file, the row and
                the reason.
        """

    @abstractmethod
    def ids(self, indices: np.ndarray) -> list:
        """Return the field ``id`` of rows, int [b]; None for a row without it."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return a row's file and position, for a message."""


class Rows(RowFiles):
    """The n rows of JSON-lines files, one file after the other; row i is a line that is not blank.

    The index has n + 1 positions (int64) in the concatenated files: the start of each row, and the total number of
    bytes. It is built once, kept in the cache under the files' paths, sizes and times of change, and memory-mapped, so
    that ranks and reading processes share its pages. Rows are parsed when they are read.

    Attributes:
        starts: The start of each file and the end of the last, int64 [files + 1], in bytes.
        index: The positions.
    """

    option = "data.field="

    def __init__(self, files: Sequence[Path], cache_dir: str | os.PathLike | None = None):
        """Index files by absolute paths. Compressed ones are unpacked into the cache."""
        super().__init__(files, [unpacked(path, cache_dir) for path in files])
        self.starts = np.cumsum([0, *(size for size, _ in self._stamps)], dtype=np.int64)
        self.index = MappedFile(cached_folder(cache_dir, f"rows-{self.key}", self._build) / _INDEX, "int64")

    def __len__(self) -> int:
        return len(self.index.array) - 1

    def lines(self, indices: np.ndarray) -> list[bytes]:
        """Return the bytes of rows, int [b], each with its line end; raise DataError for a file that has changed."""
        starts, ends = self.index.array[indices], self.index.array[np.asarray(indices) + 1]
        lines = [b""] * len(starts)
        for number, mine in by_part(self.starts, starts):
            lengths = np.minimum(ends[mine], self.starts[number + 1]) - starts[mine]
            ranges = np.stack([mine, lengths, starts[mine] - self.starts[number]], axis=1)
            with self._open(number) as file:
                for i, length, start in ranges.tolist():
                    lines[i] = os.pread(file.fileno(), length, start)
        return lines

    def read(self, indices: np.ndarray, row_tokens: RowTokens) -> list[Row | Pair]:
        """See RowFiles."""
        rows = []
        for index, line in zip(indices, self.lines(indices), strict=True):
            try:
                rows.append(_row(line, row_tokens))
            except ValueError as error:
                problem, hint = str(error), "Correct the line, or delete it"
                if is_utf16(line):
                    problem, hint = "UTF-16, not UTF-8", TO_UTF8
                elif index == 0 and ("of type dict" in problem or not line.lstrip(_MARK).startswith(b"{")):
                    hint = _TO_LINES
                raise DataError(f"{self.name(index)}: {problem}. {hint}") from None
        return rows

    def ids(self, indices: np.ndarray) -> list:
        """See RowFiles."""
        return [json.loads(line.decode("utf-8-sig")).get("id") for line in self.lines(indices)]

    def name(self, index: int) -> str:
        """Return a row's file and line, for a message. The file is read up to the row."""
        start = self.index.array[index]
        ((number, _),) = by_part(self.starts, start[None])
        with open(self._read[number], "rb") as file:
            ends = enumerate(itertools.accumulate(map(len, file)), 1)
            line = next(line for line, end in ends if end > start - self.starts[number])
        return f"{self.files[number]} line {line}"

    def _build(self, folder: Path) -> None:
        with open(folder / _INDEX, "wb") as index:
            for number, first in enumerate(self.starts[:-1]):
                with self._open(number) as file:
                    for starts in _row_starts(file):
                        index.write((starts + first).tobytes())
            index.write(self.starts[-1].tobytes())


def _row_starts(file: BinaryIO) -> Iterator[np.ndarray]:
    """Yield the starts of the lines that are not blank, as int64 arrays, each for about a MiB of whole lines."""
    position = 0
    while block := file.read(_BLOCK_BYTES) + file.readline():
        content = np.frombuffer(block, dtype=np.uint8)
        starts = np.concatenate([[0], np.flatnonzero(content[:-1] == _NEWLINE) + 1])
        # Only lines that begin with white space, which are few, are read completely.
        ends = np.append(starts[1:], len(block))
        blank = [i for i in np.flatnonzero(content[starts] <= _SPACE) if block[starts[i] : ends[i]].isspace()]
        yield position + np.delete(starts, blank)
        position += len(block)


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def chat_hint(names: Sequence[str]) -> str:
    """Return the end of a message: what to type for the first of these fields with chats; empty if there are none."""
    return f"; {names[0]!r} is a chat: type {CHATS}{names[0]}" if names else ""


def _row(line: bytes, row_tokens: RowTokens) -> Row | Pair:
    """Return the row in a line. Raises ValueError if the line is not such a row; the message says what it is."""
    try:
        row = json.loads(line.decode("utf-8-sig"))  # Windows' editors write a byte-order mark before the first row
    except ValueError as error:
        where = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"not JSON ({where})") from None
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object with the field {row_tokens.fields[0]!r} but of type {type(row).__name__}")
    try:
        return row_tokens.take(row)
    except (LookupError, TypeError, ValueError) as error:
        problem, option = str(error), CHATS if row_tokens.messages else Rows.option
        if missing := [field for field in row_tokens.fields if field not in row]:
            present = ", ".join(map(repr, list(row)[:10])) or "none"
            problem = f"the field {missing[0]!r} ({option}) is missing; there are: {present}"
        elif row_tokens.messages:
            problem = f"the field {row_tokens.messages!r} ({option}) {error}"
        chats = [name for name, value in row.items() if is_chat(value) and name != row_tokens.messages]
        raise ValueError(problem + chat_hint(chats)) from None


class Jsonl(RowData):
    """Files of JSON lines, in which each line that is not blank is a row, a JSON object. See RowData."""

    rows_class, title, suffix, packed = Rows, "JSON lines", ".jsonl", SUFFIXES

    def __init__(self, field: str | list[str] = "text", **options: Any):
        self.fields = names("field", field)
        super().__init__(**options)
