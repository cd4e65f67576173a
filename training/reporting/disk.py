"""The room that is left on a disk, for warnings and for files that somebody else writes without a word."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

FULL_BYTES = 64 * 1024
_LOOK_EVERY_S = 0.25


class DiskWatch:
    """Notices when the disk that holds ``folder`` becomes full."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._next_look = 0.0
        self._full = False

    def has_filled(self) -> bool:
        """True once for each time that less than ``FULL_BYTES`` are left. Looks four times a second at most."""
        now = self._clock()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_EVERY_S
        before, self._full = self._full, self.is_full()
        return self._full and not before

    def is_full(self) -> bool:
        """Now. False where nobody knows."""
        try:
            return shutil.disk_usage(self._folder).free < FULL_BYTES
        except OSError:
            return False
