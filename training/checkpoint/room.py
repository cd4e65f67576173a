"""Main memory that a save's copies go to, the same at every save.

Copying is quick; the kernel handing out fresh memory is not: for GPT-2's weights and AdamW's state that takes a third
of a training step, against a hundredth for the copy itself.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

_NICE = 10


class Room:
    """A place for each tensor's copy, by name. Not for two threads at a time, but for its own."""

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}
        self._toucher: threading.Thread | None = None
        self._enough = threading.Event()

    def place(self, name: str, like: Tensor) -> Tensor:
        """A tensor in main memory of the shape and type of ``like``; what the one before copied there is lost."""
        kept = self._places.get(name)
        if kept is None or kept.shape != like.shape or kept.dtype != like.dtype:
            kept = self._places[name] = torch.empty(like.shape, dtype=like.dtype)
        return kept

    def lacking(self, tensors: Mapping[str, Tensor]) -> int:
        """Bytes of ``tensors`` that have no place yet."""
        return sum(tensor.nbytes for name, tensor in tensors.items() if name not in self._places)

    def touch(self, tensors: Mapping[str, Tensor]) -> None:
        """Give ``tensors`` their places, and have a thread write to each, so that the kernel really hands it out."""
        places = [self.place(name, tensor) for name, tensor in tensors.items()]
        self._toucher = threading.Thread(target=self._touch, args=(places,), name="checkpoint-room", daemon=True)
        self._toucher.start()

    def settle(self) -> None:
        """No thread writes here any more when this returns; within some tenths of a second."""
        self._enough.set()
        if self._toucher is not None:
            self._toucher.join()
            self._toucher = None

    def _touch(self, places: list[Tensor]) -> None:
        lower_priority()
        for place in places:
            if self._enough.is_set():
                return
            ctypes.memset(place.data_ptr(), 0, place.nbytes)  # unlike zero_, on this thread alone


def lower_priority() -> None:
    """The calling thread takes the processor when training leaves it, where threads have priorities of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
