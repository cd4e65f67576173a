"""Printing that never ends a run: a closed pipe, a lost terminal, a full disk and a narrow encoding are survived."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_FAILURES = (OSError, ValueError)  # ValueError: the stream was closed in this process


class Unfailing:
    """A text stream that drops what cannot be written; in all else it is the stream that it wraps."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text; characters that the stream's encoding lacks become question marks."""
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except _FAILURES:
            pass
        return len(text)

    def flush(self) -> None:
        """Flush the stream. What a full disk does not take now is tried again at the next flush."""
        with suppress(*_FAILURES):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unfailing_output() -> Iterator[None]:
    """Let everything in the block, libraries included, print to stdout and stderr without ever failing."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (Unfailing(open(os.devnull, "w") if stream is None else stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in before:
            _drain(stream)


def open_standard_descriptors() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed, on /dev/null.

    Otherwise the first file or socket that the process opens gets the number, and is printed to.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def _drain(stream: Any) -> None:
    """Empty a stream's buffer, into /dev/null if need be: Python flushes it at its exit and fails if it cannot."""
    if stream is None:
        return
    try:
        stream.flush()
    except _FAILURES:
        with suppress(*_FAILURES, AttributeError):  # what stands for a stream may have no descriptor
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, stream.fileno())
            os.close(sink)
            stream.flush()
