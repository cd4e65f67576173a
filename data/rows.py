"""JSON-lines files as rows by number: 8 bytes per row in an index on the disk, and no memory per row."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from common.errors import DataError
from common.files import parse_json
from data.cache import MappedFile, cached_folder

# To be raised when the same files give another index: old ones are then ignored, not misread.
_INDEX_FORMAT = 1
_INDEX = "offsets.int64"
_BLOCK_BYTES = 1 << 20
_NEWLINE, _SPACE = 10, 32
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# How slow four threads may be at reading and encoding before processes that wait for them give up.
_SLOWEST_BYTES_PER_S = 0.5e6


class Rows:
    """The n rows of JSON-lines files, one file after the other; row i is a line that is not blank.

    The index holds n + 1 positions (int64) in the files laid end to end: where each row starts, and the total of bytes.
    It is built once, kept in the cache under paths, sizes and times of change, and memory-mapped: ranks and reading
    processes share its pages. Rows are parsed when they are read. No file stays open between reads, so threads, forked
    and spawned processes can share the object, and the number of files has no limit.

    Attributes:
        files: The files.
        starts: Where each file starts and the last ends, int64 [files + 1], in bytes.
        index: The positions.
        key: Names the files and their state, for the cache.
    """

    def __init__(self, files: Sequence[Path], cache_dir: str | os.PathLike | None = None):
        """Index files by absolute paths; raise DataError where one cannot be read or all lines are blank."""
        self.files = list(files)
        self._stamps = []
        for path in self.files:
            with _readable(path):
                self._stamps.append(_stamp(os.stat(path)))
        self.starts = np.cumsum([0, *(size for size, _ in self._stamps)], dtype=np.int64)
        content = [_INDEX_FORMAT, [(str(path), *stamp) for path, stamp in zip(files, self._stamps, strict=True)]]
        self.key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        folder = cached_folder(cache_dir, f"rows-{self.key}", self._build, self.patience_s)
        self.index = MappedFile(folder / _INDEX, "int64")

    @property
    def offsets(self) -> np.ndarray:
        """The positions, int64 [n + 1]."""
        return self.index.array

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lines(self, indices: np.ndarray) -> list[bytes]:
        """Return the bytes of rows, int [b], each with its line end; raise DataError for a file that has changed."""
        starts, ends = self.offsets[indices], self.offsets[np.asarray(indices) + 1]
        of_file = self._file_of(starts)
        lengths = np.minimum(ends, self.starts[of_file + 1]) - starts
        lines = [b""] * len(starts)
        for number in np.unique(of_file).tolist():
            mine = np.flatnonzero(of_file == number)
            places = np.stack([mine, lengths[mine], starts[mine] - self.starts[number]], axis=1)
            with self._open(number) as descriptor:
                for i, length, start in places.tolist():
                    lines[i] = os.pread(descriptor, length, start)
        return lines

    def texts(self, indices: np.ndarray, fields: Sequence[str]) -> list[str]:
        """Return the strings of some fields of rows, int [b], joined by newlines.

        Raises:
            DataError: A row is not a JSON object with these strings. It names the file, the line and the reason.
        """
        texts = []
        for index, line in zip(indices, self.lines(indices), strict=True):
            try:
                row = parse_json(line.decode())
                texts.append("\n".join([row[field] for field in fields]))
            except (ValueError, LookupError, TypeError):
                number, path = self.place(index)
                raise DataError(
                    f"{path} line {number}: {_problem(line, fields)}. Correct the line, or delete it"
                ) from None
        return texts

    def texts_in_order(self, fields: Sequence[str], about_bytes: int = 1 << 22) -> Iterator[list[str]]:
        """Yield the texts of all rows, in lists of about so many bytes. Raises as texts() does."""
        start = 0
        while start < len(self):
            stop = int(np.searchsorted(self.offsets, self.offsets[start] + about_bytes))
            stop = min(max(stop, start + 1), len(self))
            yield self.texts(np.arange(start, stop), fields)
            start = stop

    def place(self, index: int) -> tuple[int, Path]:
        """Return a row's line number, from 1 on, and its file, which is read up to the row."""
        start = self.offsets[index]
        number = int(self._file_of(start))
        left, line = int(start - self.starts[number]), 1
        with _readable(self.files[number]), open(self.files[number], "rb", buffering=0) as file:
            while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
                left -= len(block)
                line += block.count(b"\n")
        return line, self.files[number]

    @property
    def patience_s(self) -> float:
        """How many seconds to wait for another process that reads all rows."""
        return 900.0 + float(self.starts[-1]) / _SLOWEST_BYTES_PER_S

    def _file_of(self, positions: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts, positions, side="right") - 1

    @contextmanager
    def _open(self, number: int) -> Iterator[int]:
        path = self.files[number]
        with _readable(path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if _stamp(os.fstat(descriptor)) != self._stamps[number]:
                    raise DataError(f"{path} has changed since it was indexed; start the run again")
                yield descriptor
            finally:
                os.close(descriptor)

    def _build(self, folder: Path) -> None:
        rows = 0
        with open(folder / _INDEX, "wb") as file:
            for number, first in enumerate(self.starts[:-1]):
                for starts in self._row_starts(number):
                    file.write((starts + first).tobytes())
                    rows += len(starts)
            file.write(self.starts[-1].tobytes())
        if not rows:
            more = f" and {len(self.files) - 1} more files" if len(self.files) > 1 else ""
            raise DataError(f"{self.files[0]}{more}: {self.starts[-1]} bytes and no row; give a file of JSON lines")

    def _row_starts(self, number: int) -> Iterator[np.ndarray]:
        """Yield where rows start in a file, as int64 arrays, one for each block that is read.

        A row starts where a line starts that is not blank.
        """
        position, line_starts = 0, True
        with self._open(number) as descriptor:
            while block := os.pread(descriptor, _BLOCK_BYTES, position):
                content = np.frombuffer(block, dtype=np.uint8)
                starts = np.flatnonzero(content == _NEWLINE) + 1
                if line_starts:  # the block before ended with a line, or this is the first
                    starts = np.concatenate([[0], starts])
                # A line that begins behind this block's last byte belongs to the next block, if there is one.
                line_starts = starts.size > 0 and starts[-1] == len(block)
                starts = starts[: len(starts) - line_starts]
                # Windows' editors write a byte-order mark, which is no part of the JSON of the first row.
                if position == 0 and block.startswith(_BYTE_ORDER_MARK) and len(block) > len(_BYTE_ORDER_MARK):
                    starts[0] = len(_BYTE_ORDER_MARK)
                # Blank lines are no rows. What a line begins with decides in nearly every case: only those that begin
                # with white space are read one by one, to their end, which may lie in a later block.
                first = content[starts]
                rows = first != _NEWLINE
                for i in np.flatnonzero(rows & (first <= _SPACE)):
                    rows[i] = not _blank(descriptor, position + int(starts[i]))
                yield position + starts[rows]
                position += len(block)


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}. Check the file and data.root=") from error


def _blank(descriptor: int, position: int) -> bool:
    """Whether nothing but white space follows up to the end of the line."""
    while piece := os.pread(descriptor, 256, position):
        line, newline, _ = piece.partition(b"\n")
        if line.strip(b" \t\r"):
            return False
        if newline:
            return True
        position += len(piece)
    return True


def _problem(line: bytes, fields: Sequence[str]) -> str:
    """Return what is wrong with a row, in words."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1} of the line ({error.reason})"
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg} at character {error.pos + 1})"
    except (ValueError, RecursionError) as error:
        return f"not JSON that can be read ({error})"
    if not isinstance(row, dict):
        return f"not a JSON object with the field {fields[0]!r} but {_kind(row)}"
    missing = [field for field in fields if field not in row]
    if missing:
        there = ", ".join(map(repr, list(row)[:10])) or "none"
        return f"the field {missing[0]!r} (data.field=) is missing; there are: {there}"
    field = next(field for field in fields if not isinstance(row[field], str))
    return f"the field {field!r} is not a string but {_kind(row[field])}"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
