"""The last heartbeat of each rank, and the request to stop: a page that the launching process and its workers share."""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_STOP = struct.Struct("=q")
_ROW = struct.Struct("=qd48s")
# What a rank is doing once its work is done.
FINISHED = "finished"


@dataclass(frozen=True)
class Heartbeat:
    """What a rank said last.

    Attributes:
        step: The last step that is done.
        since: The time at which it was said, on the monotonic clock, in seconds.
        doing: What the rank began then.
    """

    step: int
    since: float
    doing: str

    @property
    def silent_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self.since


class Board:
    """The page, in a file that all processes map: a write is a copy in memory."""

    def __init__(self, path: str | os.PathLike, ranks: int | None = None) -> None:
        """Opens the page.

        Args:
            path: The file.
            ranks: The number of ranks, given by the process that creates the file.
        """
        if ranks is not None:
            Path(path).write_bytes(bytes(_STOP.size + ranks * _ROW.size))
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)

    def ask_to_stop(self) -> None:
        """Tells all ranks to end at the next point where a run can."""
        _STOP.pack_into(self._page, 0, 1)

    def stop_wanted(self) -> bool:
        """Whether the ranks were told to end."""
        return _STOP.unpack_from(self._page)[0] != 0

    def write(self, rank: int, heartbeat: Heartbeat) -> None:
        """Replaces the rank's heartbeat; its text is cut off after 48 bytes."""
        _ROW.pack_into(self._page, self._offset(rank), heartbeat.step, heartbeat.since, heartbeat.doing.encode()[:48])

    def read(self, rank: int) -> Heartbeat:
        """The rank's last heartbeat; of step 0 and time 0 where there was none."""
        step, since, doing = _ROW.unpack_from(self._page, self._offset(rank))
        return Heartbeat(step, since, doing.rstrip(b"\0").decode(errors="ignore"))

    @staticmethod
    def _offset(rank: int) -> int:
        return _STOP.size + rank * _ROW.size


_mine = Heartbeat(0, time.monotonic(), "starting")
_board: tuple[Board, int] | None = None


def publish(board: Board, rank: int) -> None:
    """From now on this process's heartbeats are `rank`'s on `board`."""
    global _board
    _board = board, rank
    note(0, "starting")


def note(step: int, doing: str) -> None:
    """Notes that this process has done `step` and begins with `doing`, such as "reading data"."""
    global _mine
    _mine = Heartbeat(step, time.monotonic(), doing)
    if _board is not None:
        board, rank = _board
        board.write(rank, _mine)


def here() -> Heartbeat:
    """This process's last heartbeat."""
    return _mine
