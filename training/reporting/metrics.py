"""The files of a run's numbers: ``metrics.jsonl`` line by line, and JSON files that are replaced whole."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import stat
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.files import explain, parse_json, read_regular, write_atomically
from training.reporting.masking import mask_secrets

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"

_LONGEST_LINE = 1 << 16  # bytes
_LARGEST = 1 << 32  # bytes of a metrics.jsonl

log = logging.getLogger("training")


class MetricsFile:
    """A file of one JSON object per line, each handed to the operating system at once.

    A full or unwritable disk does not end the training: lines that cannot be written wait in memory and are written
    as soon as that is possible again. Each outage is warned about once. The file holds whole lines only; half a line
    that a killed process has left is cut off. One process at a time may write to a file; one that was removed, cut
    short or written to by another is warned about once, at the next write, and begun anew where it is gone.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        """Takes the path. The file is made, with its folder, at the first write; an existing one is appended to."""
        self.path = Path(path)
        self._pending: deque[bytes] = deque()
        self._failing = self._disturbed = False
        self._fd: int | None = None
        self._end = 0  # of the file, as this object has left it

    def write(self, record: dict) -> None:
        """Appends a record as one line.

        Args:
            record: NaN and infinity are written as null; tensors and arrays as numbers and lists.
        """
        self._pending.append((json.dumps(jsonable(record), allow_nan=False) + "\n").encode())
        self._write_pending()

    def truncate_after(self, step: int) -> None:
        """Cuts the file off before the first record whose "step" is larger, or that is no JSON object.

        A run that is resumed after ``step`` writes those records again. This needs no free space. Where the file
        cannot be changed, a warning is logged.
        """
        self._close_fd()
        self._pending = deque(line for line in self._pending if _is_up_to(line, step))
        try:
            end = 0
            for line in read_regular(self.path, _LARGEST).splitlines(keepends=True):
                if not _is_up_to(line, step):
                    os.truncate(self.path, end)
                    break
                end += len(line)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s still holds records after step %d: %s", self.path, step, explain(error, self.path))

    def close(self) -> None:
        """Writes what is pending, forces the file to the disk and closes it. A later ``write`` opens it again."""
        if self._pending:
            self._write_pending()
        if self._fd is not None:
            try:
                os.fsync(self._fd)  # network file systems report a full disk only here
            except OSError as error:
                log.warning("%s may be incomplete: %s", self.path, explain(error, self.path))
        self._close_fd()
        if self._pending:
            log.warning("%s lacks %d records, which could not be written before the run ended", self.path,
                        len(self._pending))  # fmt: skip

    def _write_pending(self) -> None:
        waiting = len(self._pending) - 1
        try:
            if self._fd is not None and (change := self._foreign_change()) is not None:
                self._warn_of_change(change)
                self._close_fd()
            if self._fd is None:
                self._fd = _open_to_append(self.path)
            while self._pending:
                self._end = _append(self._fd, self._pending[0])
                self._pending.popleft()
        except OSError as error:
            if not self._failing:
                log.warning("cannot write %s: %s. Training goes on; records are kept in memory and written when the "
                            "disk has space again", self.path, explain(error, self.path))  # fmt: skip
            self._failing = True
            self._close_fd()  # a new descriptor at the next attempt also recovers from a remounted disk
            return
        if self._failing:
            log.warning("%s can be written again; %d records of the outage were added", self.path, waiting)
            self._failing = False

    def _foreign_change(self) -> str | None:
        """Returns what has happened to the file since the last write, in words; None where nothing has."""
        mine = os.fstat(self._fd)
        try:
            if not os.path.samestat(os.stat(self.path), mine):
                return "was replaced by another file"
        except FileNotFoundError:
            return "was removed"
        if mine.st_size < self._end:
            return "was cut short"
        return "was written to by another process" if mine.st_size > self._end else None

    def _warn_of_change(self, change: str) -> None:
        if not self._disturbed:
            log.warning("%s %s while this run writes to it: records up to here may be lost or mixed with others. The "
                        "next ones are written to the file of that name", self.path, change)  # fmt: skip
        self._disturbed = True

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, None
        try:
            if fd is not None:
                os.close(fd)
        except OSError:
            pass  # the descriptor is gone either way


def _open_to_append(path: Path) -> int:
    """Opens a file behind its last whole line and returns the descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    start = max(0, os.fstat(fd).st_size - _LONGEST_LINE)
    os.ftruncate(fd, start + os.pread(fd, _LONGEST_LINE, start).rfind(b"\n") + 1)
    return fd


def _append(fd: int, line: bytes) -> int:
    """Writes a whole line, or none of it; returns the new end of the file."""
    end = os.lseek(fd, 0, os.SEEK_END)
    try:
        while line:
            line = line[os.write(fd, line) :]
    except OSError:
        os.ftruncate(fd, end)
        raise
    return os.lseek(fd, 0, os.SEEK_END)


def write_json(path: str | os.PathLike, content: Any) -> bool:
    """Replaces a JSON file by a new one, with secrets masked.

    Args:
        path: The file, which holds either its old content or the whole new one at every moment.
        content: Converted as by ``MetricsFile.write``.

    Returns:
        True, or False after a warning where the disk is full or the folder cannot be written.
    """
    text = json.dumps(mask_secrets(jsonable(content)), indent=2, allow_nan=False)
    return write_or_warn(path, text + "\n")


def write_or_warn(path: str | os.PathLike, data: bytes | str) -> bool:
    """Replaces a file as a whole; returns False, after a warning, where the disk is full or the folder not writable."""
    try:
        write_atomically(Path(path), data)
        return True
    except OSError as error:
        log.warning("cannot write %s: %s. Training goes on without it", path, explain(error, Path(path)))
        return False


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in the file ``path``, or {} if it cannot be read."""
    try:
        content = parse_json(read_regular(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a ``metrics.jsonl``.

    A missing file has none. A line that a killed run has left half written ends the list.
    """
    records = []
    try:
        for line in read_regular(path, _LARGEST).splitlines():
            record = _parse(line)
            if record is None:
                break
            records.append(record)
    except OSError:
        pass
    return records


def after_warmup(seconds: Sequence[float]) -> Sequence[float]:
    """Leaves out the steps in which a run warms up (compilation, allocator, caches).

    Args:
        seconds: The duration of each step, in order.

    Returns:
        The durations without the first two steps or the first tenth, whichever is more; all of them where there are
        fewer than four.
    """
    steps = len(seconds)
    return seconds[max(2, steps // 10) if steps >= 4 else 0 :]


def jsonable(value: Any) -> Any:
    """Returns a copy of a value made of what JSON knows; NaN and infinity become None."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)  # an IntEnum is written as its number
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # tensors, numpy arrays and numpy numbers
        return jsonable(value.tolist())
    return str(value)


def _is_up_to(line: bytes, step: int) -> bool:
    record = _parse(line)
    number = None if record is None else record.get("step", 0)
    return isinstance(number, int) and number <= step


def _parse(line: bytes) -> dict | None:
    """Returns the JSON object of a line, or None where it holds none."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
