"""Printing goes on, or is dropped, whatever becomes of the streams."""

import errno
import io
import sys

import pytest

from common.machine import unfailing_output


class Broken(io.StringIO):
    """A stream that fails as the operating system does."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error

    def flush(self):
        raise self.error


@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(errno.EPIPE, "Broken pipe"), OSError(errno.ENOSPC, "full"), ValueError("I/O on closed file")],
    ids=lambda error: type(error).__name__,
)
def test_a_stream_that_fails_ends_nothing(monkeypatch, error):
    monkeypatch.setattr(sys, "stdout", Broken(error))
    with unfailing_output():
        print("a word", flush=True)
    assert isinstance(sys.stdout, Broken), "the stream is put back"


def test_characters_that_the_encoding_lacks_become_question_marks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with unfailing_output():
        print("data: 3 tokens, …", flush=True)
    assert raw.getvalue() == b"data: 3 tokens, ?\n"


def test_without_a_stream_printing_does_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with unfailing_output():
        print("a word", flush=True)
