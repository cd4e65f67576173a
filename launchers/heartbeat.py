"""How far each rank has come, and the wish to stop: one page that the launching process and its workers share."""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_WISH = struct.Struct("=q")
_ROW = struct.Struct("=qd48s")


@dataclass(frozen=True)
class Whereabouts:
    """step: the last one that is done; doing: what the rank has begun since, at the monotonic time `since`."""

    step: int
    since: float
    doing: str

    @property
    def silent_s(self) -> float:
        """Seconds since this was noted."""
        return time.monotonic() - self.since


class Board:
    """The page, in a file at `path`; `ranks` is given by the process that makes it. A write is a copy in memory."""

    def __init__(self, path: str | os.PathLike, ranks: int | None = None) -> None:
        if ranks is not None:
            Path(path).write_bytes(bytes(_WISH.size + ranks * _ROW.size))
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)

    def ask_to_stop(self) -> None:
        """Tell all ranks to end at their next border."""
        _WISH.pack_into(self._page, 0, 1)

    def stop_wanted(self) -> bool:
        return _WISH.unpack_from(self._page)[0] != 0

    def write(self, rank: int, at: Whereabouts) -> None:
        _ROW.pack_into(self._page, self._offset(rank), at.step, at.since, at.doing.encode()[:48])

    def read(self, rank: int) -> Whereabouts:
        step, since, doing = _ROW.unpack_from(self._page, self._offset(rank))
        return Whereabouts(step, since, doing.rstrip(b"\0").decode())

    @staticmethod
    def _offset(rank: int) -> int:
        return _WISH.size + rank * _ROW.size


_mine = Whereabouts(0, time.monotonic(), "starting")
_board: tuple[Board, int] | None = None


def publish(board: Board, rank: int) -> None:
    """From now on what this process notes stands in `board` too, as `rank`'s."""
    global _board
    _board = board, rank
    board.write(rank, _mine)


def note(step: int, doing: str) -> None:
    """This process has done `step` and begins with `doing` ("reading data")."""
    global _mine
    _mine = Whereabouts(step, time.monotonic(), doing)
    if _board is not None:
        board, rank = _board
        board.write(rank, _mine)


def here() -> Whereabouts:
    """What this process noted last."""
    return _mine
