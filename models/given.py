"""The target of a section whose object a Python program has given (``training.train(..., model=...)``)."""

from __future__ import annotations

from typing import Any

from common.given import take


def given(key: str, fingerprint: str = "", vocab_size: int | None = None) -> Any:
    """Return what was given.

    Args:
        key: "model" or "data".
        fingerprint: Of the object that the configuration was made for.
        vocab_size: Of a language model: the program reads it.

    Raises:
        UserError: This process was given none, or another.
    """
    return take(key, fingerprint)
