"""Parquet files: one sample per row, the text of one or several columns. Needs the package pyarrow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import DataError
from data.dataset import by_part
from data.jsonl import CHATS, RowData, RowFiles, chat_hint, names
from data.prompts import Pair, Row, RowTokens

_CACHE_BYTES = 256 << 20
_CHATS = re.compile(r"(large_)?list<\w+: struct<.*\b(role|from): ")  # the types of columns of chats
# The columns of the row groups that this process decoded, the most recently used at the end. Threads change it by
# single operations of the dict, because a lock might be held while another thread forks.
_decoded: dict[tuple, dict[str, Any]] = {}


class ParquetRows(RowFiles):
    """The rows of Parquet files, one file after the other, with the methods of data.jsonl.Rows.

    The requested columns of a row group are decoded together. A process keeps about 256 MiB of the newest row groups.
    """

    option = "data.column="

    def __init__(self, files: Sequence[Path], cache_dir: Any = None):
        """Read the positions of the row groups; raise DataError if a file is not Parquet. Nothing is cached."""
        super().__init__(files)
        groups, self._names = [], []
        for number in range(len(self.files)):
            with self._parquet(number) as file:
                self._names.append(file.schema_arrow.names)
                groups += [(number, i, file.metadata.row_group(i).num_rows) for i in range(file.num_row_groups)]
        self._groups = np.array(groups, np.int64).reshape(-1, 3)
        self._starts = np.cumsum([0, *self._groups[:, 2]])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: np.ndarray, row_tokens: RowTokens) -> list[Row | Pair]:
        """See RowFiles."""
        rows: list[Any] = [None] * len(indices)
        fields, chats = row_tokens.fields, row_tokens.messages is not None
        option = CHATS if chats else self.option
        for i, values in self._values(indices, fields, ["tools"] * chats, option):
            try:
                rows[i] = row_tokens.take({name: _plain(v.as_py(), v.type) for name, v in values.items()})
            except (TypeError, ValueError) as error:  # of another type; not UTF-8
                problem, hint = str(error), ""
                if not chats:
                    held = (str(value.type) if value.is_valid else "null" for value in values.values())
                    problem = f"is {', '.join(held)}, not text in UTF-8"
                    hint = chat_hint([name for name, value in values.items() if _CHATS.match(str(value.type))])
                raise DataError(
                    f"{self.name(int(indices[i]))}: {', '.join(fields)} {problem}. Correct it, or choose another "
                    f"column by {option}{hint}"
                ) from None
        return rows

    def ids(self, indices: np.ndarray) -> list:
        """See RowFiles."""
        found = {i: v["id"].as_py() for i, v in self._values(indices, [], ["id"], self.option) if v}
        return [found.get(i) for i in range(len(indices))]

    def _values(
        self, indices: np.ndarray, fields: Sequence[str], optional: Sequence[str], option: str
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the place of each row in ``indices`` and its values, of ``optional`` columns where files have them."""
        for position, mine in by_part(self._starts, indices):
            number, group, _ = self._groups[position].tolist()
            more = [name for name in optional if name in self._names[number]]
            columns = self._columns(number, group, [*fields, *more], option)
            for i in mine.tolist():
                yield i, {name: column[int(indices[i] - self._starts[position])] for name, column in columns.items()}

    def name(self, index: int) -> str:
        """Return a row's file and number, for a message."""
        ((position, _),) = by_part(self._starts, np.array([index]))
        number, group, _ = self._groups[position].tolist()
        return f"{self.files[number]} row {index - self._starts[position - group]} (from 0)"

    def _columns(self, number: int, group: int, fields: Sequence[str], option: str) -> dict[str, Any]:
        """Return some columns of a row group, by name. ``option`` is the one that names them."""
        key = (self.key, number, group, *fields)
        if (columns := _decoded.pop(key, None)) is None:
            with self._parquet(number) as file:
                present = self._names[number]
                if missing := [field for field in fields if field not in present]:
                    chats = [field.name for field in file.schema_arrow if _CHATS.match(str(field.type))]
                    problem = (
                        f"the column {missing[0]!r} ({option}) is missing; there are {present[:10]}{chat_hint(chats)}"
                    )
                    raise DataError(f"{self.files[number]}: {problem}")
                # Without Arrow's threads, which a forked process would not have.
                table = file.read_row_group(group, columns=list(fields), use_threads=False)
                columns = {field: table[field] for field in fields}
        _decoded[key] = columns
        fit = _CACHE_BYTES // max(1, sum(column.nbytes for column in columns.values()))  # if all are of this size
        while len(_decoded) > max(1, fit):
            _decoded.pop(next(iter([*_decoded]), ()), None)
        return columns

    @contextmanager
    def _parquet(self, number: int) -> Iterator[Any]:
        """Open a file as pyarrow.parquet.ParquetFile."""
        import pyarrow.parquet

        try:
            with self._open(number) as file:
                yield pyarrow.parquet.ParquetFile(file, pre_buffer=False)
        except (pyarrow.ArrowException, OSError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{self.files[number]} cannot be read as Parquet ({reason}); write it again") from error


class Parquet(RowData):
    """Parquet files. See RowData."""

    requires = "pyarrow"
    rows_class, title, suffix = ParquetRows, "Parquet rows", ".parquet"

    def __init__(self, column: str | list[str] = "text", **options: Any):
        self.fields = names("column", column)
        super().__init__(**options)


def _plain(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type as JSON lines have it. Raises ValueError if it is not JSON or not UTF-8."""
    if isinstance(value, bytes):
        value = value.decode()
    if getattr(kind, "extension_name", None) == "arrow.json" and value is not None:
        return json.loads(value)
    if isinstance(value, dict):
        # A struct has the keys of all rows, with null where a row had none.
        return {key: _plain(each, kind.field(key).type) for key, each in value.items() if each is not None}
    if isinstance(value, list) and hasattr(kind, "item_type"):  # a map, whose pairs are tuples
        return {_plain(key, kind.key_type): _plain(each, kind.item_type) for key, each in value}
    return [_plain(each, kind.value_type) for each in value] if isinstance(value, list) else value
