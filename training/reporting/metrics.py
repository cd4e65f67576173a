"""The files of a run's numbers: ``metrics.jsonl``, written line by line, and JSON files, written as a whole."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.files import explain, jsonable, write_atomically
from conf.masking import mask_secrets

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
# Speeds say nothing about learning, and a perplexity is drawn as its loss.
_NOT_DRAWN = ("step", "skipped", "step_time_s", "samples_per_s", "tokens_per_s", "mfu", "val_perplexity")

Points = Mapping[str, Sequence[tuple[int, float]]]  # by name, each number of a run with its step

log = logging.getLogger("training")


class MetricsFile:
    """A file with one JSON object per line, each written to the operating system immediately.

    A full or unwritable disk does not end the training: lines are kept in memory until they can be written. There is
    one warning per outage. The file contains whole lines only. If the file was removed, a warning is logged and a new
    one is begun.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        """Store the path. The first write creates the file and its folder, or appends to an existing file."""
        self.path = Path(path)
        self._pending: deque[bytes] = deque()
        self._file: io.FileIO | None = None

    def write(self, record: dict) -> None:
        """Append a record as one line. NaN and infinity are written as null; tensors as numbers and lists."""
        waiting = len(self._pending)
        self._pending.append((json.dumps(jsonable(record), allow_nan=False) + "\n").encode())
        try:
            self._write_pending()
        except OSError as error:
            if not waiting:
                log.warning("cannot write %s: %s. Training goes on; records are kept in memory and written when the "
                            "disk has space again", self.path, explain(error, self.path))  # fmt: skip
            self._close_file()  # opening it again at the next attempt also recovers from a remounted disk
        else:
            if waiting:
                log.warning("%s can be written again; %d records of the outage were added", self.path, waiting)

    def close(self) -> None:
        """Write pending lines, force the file to the disk and close it. A later ``write`` opens it again."""
        try:
            if self._pending:
                self._write_pending()
            if self._file is not None:
                os.fsync(self._file)  # network file systems report a full disk only here
        except OSError as error:
            log.warning("%s may be incomplete; %d records could not be written before the run ended: %s", self.path,
                        len(self._pending), explain(error, self.path))  # fmt: skip
        self._close_file()

    def _write_pending(self) -> None:
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
            log.warning("%s was removed while this run writes to it: its records up to here are lost. The next ones "
                        "are written to a new file", self.path)  # fmt: skip
            self._close_file()
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)
        while self._pending:
            _append(self._file, self._pending[0])
            self._pending.popleft()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        with suppress(OSError):  # it is closed either way
            if file is not None:
                file.close()


def truncate_after(path: Path, step: int) -> None:
    """Cut a ``metrics.jsonl`` off before the first record whose "step" is larger, or that is not a JSON object.

    A run that resumes after ``step`` writes the removed records again. No free space is needed. If the file cannot be
    changed, a warning is logged.
    """
    try:
        with open(path, "r+b") as file:
            for line in iter(file.readline, b""):
                number = (_parse(line) or {"step": None}).get("step", 0)
                if not isinstance(number, int) or number > step:
                    file.truncate(file.tell() - len(line))
                    break
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s still has records after step %d: %s", path, step, explain(error, path))


def _append(file: io.FileIO, line: bytes) -> None:
    """Write a whole line, or none of it."""
    end = file.seek(0, os.SEEK_END)
    try:
        while line:
            line = line[file.write(line) :]
    except OSError:
        file.truncate(end)
        raise


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Replace a JSON file by a new one, with secrets masked; log a warning if this fails (see ``write_or_warn``).

    Args:
        path: The file. At every moment, it has either its old content or the whole new one.
        content: Converted as by ``MetricsFile.write``.
    """
    text = json.dumps(mask_secrets(jsonable(content)), indent=2, allow_nan=False)
    write_or_warn(path, text + "\n")


def write_or_warn(path: str | os.PathLike, data: bytes | str) -> None:
    """Replace a file as a whole; log a warning if the disk is full or the folder not writable."""
    try:
        write_atomically(Path(path), data)
    except OSError as error:
        log.warning("cannot write %s: %s. Training goes on without it", path, explain(error, Path(path)))


def write_table(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records as a CSV file. The columns are the keys of all records, in order of first occurrence."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for record in records for key in record)))
        writer.writeheader()
        writer.writerows(records)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file ``path``, or {} if it cannot be read."""
    with suppress(OSError):
        return _parse(path.read_bytes()) or {}
    return {}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a ``metrics.jsonl``.

    The list is empty if the file is missing. It ends before an incomplete line, which a killed run may leave.
    """
    records = []
    with suppress(OSError):
        for line in path.read_bytes().splitlines():
            if (record := _parse(line)) is None:
                break
            records.append(record)
    return records


def points_of(records: Iterable[Mapping[str, Any]], names: Sequence[str] = ()) -> Points:
    """Return the numbers with these names (by default all that tell of learning) in the records of a run."""
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for key in names or record.keys() - {*_NOT_DRAWN}:
            if isinstance(value := record.get(key), int | float):
                points.setdefault(key, []).append((record["step"], value))
    return points


def after_warmup(seconds: Sequence[float]) -> Sequence[float]:
    """Return the durations of steps without the warm-up (compilation, allocator, caches).

    Args:
        seconds: The duration of each step, in order.

    Returns:
        The durations without the first two steps or the first tenth, whichever is more; all of them if there are fewer
        than four.
    """
    steps = len(seconds)
    return seconds[max(2, steps // 10) if steps >= 4 else 0 :]


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dicts by dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def _parse(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a text; None if the text is not a JSON object."""
    with suppress(ValueError):
        found = json.loads(text)
        return found if isinstance(found, dict) else None
    return None
