"""Tokens that a run adds to GPT-2's vocabulary: ``model.extra_tokens={"<a>": "start of an entity", "<b>": null}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from common.errors import DataError

_EXAMPLE = """'model.extra_tokens={"<a>": "start of an entity", "<b>": null}'"""


def parse_extra_tokens(value: Any) -> dict[str, str | None]:
    """The new tokens in their order, each with the words that describe it, or None.

    value   a mapping, the JSON text of one (as the command line has it), or None for no tokens
    raises  DataError for anything else, and for names that could not be told from each other in a text
    """
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"model.extra_tokens={value} is not JSON ({error}); write {_EXAMPLE}") from None
    if not hasattr(value, "items"):
        raise DataError(f"model.extra_tokens={value} must map tokens to descriptions: write {_EXAMPLE}")
    tokens = {name: description for name, description in value.items()}
    _check(tokens)
    return tokens


def _check(tokens: Mapping[str, str | None]) -> None:
    for name, description in tokens.items():
        if not isinstance(name, str) or not name.strip() or any(c in name for c in "\r\n"):
            raise DataError(f"model.extra_tokens: {name!r} is no token; a token is text within a line")
        if description is not None and (not isinstance(description, str) or not description):
            raise DataError(
                f"model.extra_tokens: the description of {name} is {description!r}; give words, or null for the mean "
                "of all tokens"
            )
    ordered = sorted(tokens)
    for shorter, longer in zip(ordered[:-1], ordered[1:], strict=True):
        if longer.startswith(shorter):
            raise DataError(
                f"model.extra_tokens: {longer} begins with {shorter}, so a text does not tell which of them is meant; "
                "rename one"
            )
