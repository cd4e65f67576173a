"""JSON files that survive a full disk: `metrics.jsonl` line by line, and whole files atomically."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

from common.files import explain

log = logging.getLogger("training")

MAX_PENDING_LINES = 100_000  # about 20 MB; beyond that the oldest unwritten lines are given up


class MetricsFile:
    """One JSON object per line, handed to the operating system at every write.

    No method raises on a full or unwritable disk. A line that cannot be written is kept in memory (the newest
    `max_pending` of them) and tried again at the next `write`; each outage is warned about once. The file
    holds whole lines only: half a line, left by a failed write or a killed process, is cut off again.
    One process at a time may write to a path.
    """

    def __init__(self, path: str | os.PathLike, max_pending: int = MAX_PENDING_LINES):
        """Use `path` (created with its parents at the first write, appended to if it exists)."""
        self.path = Path(path)
        self._pending: deque[bytes] = deque()
        self._max_pending = max_pending
        self._dropped = 0
        self._failing = False
        self._fd: int | None = None
        self._end = 0  # offset behind the last whole line

    def write(self, record: dict) -> None:
        """Append `record` as one line. NaN and infinity become null; tensors and arrays become lists."""
        line = json.dumps(jsonable(record), allow_nan=False) + "\n"
        self._pending.append(line.encode())
        if len(self._pending) > self._max_pending:
            self._pending.popleft()
            self._dropped += 1
        self._write_pending()

    def truncate_after(self, step: int) -> bool:
        """Drop every record whose "step" is larger than `step`: a run resumed there writes them anew.

        Lines that are no JSON object are dropped too. Returns False, after a warning, where the file could
        not be changed; it is then as it was before.
        """
        self._pending = deque(line for line in self._pending if _is_up_to(line, step))
        self._close_fd()
        try:
            before = self.path.read_bytes() if self.path.exists() else b""
            after = b"".join(line for line in before.splitlines(keepends=True) if _is_up_to(line, step))
            if before.startswith(after):
                # The usual case: steps only grow. Cutting needs no free space and cannot be seen half done.
                if len(after) < len(before):
                    os.truncate(self.path, len(after))
            else:
                _replace(self.path, after)
            return True
        except OSError as error:
            log.warning("%s still holds records after step %d: %s", self.path, step,
                        explain(error, self.path))
            return False

    def of_step(self, step: int) -> list[dict]:
        """The records in the file whose "step" is `step`; none where it cannot be read."""
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError:
            return []
        likely = [line for line in lines if b'"step": %d' % step in line]
        return [record for record in map(_parsed, likely) if record.get("step") == step]

    def close(self) -> None:
        """Write what is pending, force the file to the disk and close it. A later `write` opens it again."""
        if self._pending:
            self._write_pending()
        if self._fd is not None:
            try:
                os.fsync(self._fd)  # network file systems report a full disk only here
            except OSError as error:
                log.warning("%s may be incomplete: %s", self.path, explain(error, self.path))
        self._close_fd()
        if self._pending or self._dropped:
            log.warning("%s lacks %d records: they could not be written before the end of the run",
                        self.path, len(self._pending) + self._dropped)

    def _write_pending(self) -> None:
        late = len(self._pending) - 1
        try:
            if self._fd is None:
                self._open()
            while self._pending:
                self._append(self._pending[0])
                self._pending.popleft()
        except OSError as error:
            if not self._failing:
                log.warning("cannot write %s: %s. Training goes on; up to %d records are kept in memory and "
                            "written when that works again", self.path, explain(error, self.path),
                            self._max_pending)
            self._failing = True
            self._cut_torn_line()
            self._close_fd()  # a fresh descriptor at the next try also recovers from a remounted disk
            return
        if self._failing:
            log.warning("%s can be written again: %d records of the outage caught up, %d lost",
                        self.path, late, self._dropped)
            self._failing, self._dropped = False, 0

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        self._end = _end_of_last_line(self._fd)
        os.ftruncate(self._fd, self._end)

    def _append(self, line: bytes) -> None:
        written = 0
        while written < len(line):
            written += os.pwrite(self._fd, line[written:], self._end + written)
        self._end += len(line)

    def _cut_torn_line(self) -> None:
        try:
            if self._fd is not None:
                os.ftruncate(self._fd, self._end)
        except OSError:
            pass  # `_open` cuts it at the next try

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, None
        try:
            if fd is not None:
                os.close(fd)
        except OSError:
            pass  # the descriptor is gone either way


def write_json(path: str | os.PathLike, obj) -> bool:
    """Write `obj` as indented JSON so that `path` holds either the old file or the whole new one.

    Values are converted as in `MetricsFile.write`. Returns True, or False after a warning where the disk is
    full or the folder cannot be written; never raises `OSError`.
    """
    try:
        _replace(Path(path), (json.dumps(jsonable(obj), indent=2, allow_nan=False) + "\n").encode())
        return True
    except OSError as error:
        log.warning("cannot write %s: %s. Training goes on without it", path, explain(error, Path(path)))
        return False


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; none where there is no file, and without what a killed job left half written."""
    found = []
    try:
        for line in path.read_text().splitlines():
            found.append(json.loads(line))
    except (OSError, ValueError):
        pass
    return found


def jsonable(value):
    """A copy of `value` made of what JSON knows. NaN and infinity, unknown to strict JSON, become None."""
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


def _parsed(line: bytes) -> dict:
    """The JSON object of a line; an empty one where it holds none."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _is_up_to(line: bytes, step: int) -> bool:
    record = _parsed(line)
    if not record:
        return False
    at = record.get("step")
    return not (isinstance(at, (int, float)) and at > step)


def _end_of_last_line(fd: int, block: int = 1 << 16) -> int:
    """The offset behind the last newline of an open file, 0 where there is none."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _replace(path: Path, data: bytes) -> None:
    """Write `data` beside `path` and rename it into place. Raises `OSError`, leaving the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the data does
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
