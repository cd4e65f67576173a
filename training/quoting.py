"""Values of the command line that Hydra's grammar would read something into: quoted for it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence


def hydra_word(text: str) -> str:
    """``text`` as the value of an override: in quotes, unless it is a plain word or path."""
    if re.fullmatch(r"[\w./:%@+-]+", text):
        return text
    return quoted(text)


def quoted(text: str) -> str:
    """``text`` in the quotes of Hydra's grammar, in which a backslash escapes a quote and those before a quote."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def quote_values(arguments: Sequence[str]) -> list[str]:
    """The command line ``arguments`` with two values as Hydra can take them in.

    sample.prompt=…       is any text, unless the user has quoted it for Hydra
    model.extra_tokens=…  is JSON, ``{"<a>": "start of an entity"}``: Hydra's own mappings have no such keys
    """
    return [_quote_value(argument) for argument in arguments]


def _quote_value(argument: str) -> str:
    key, equals, value = argument.partition("=")
    name = key.lstrip("+")
    prompt = name == "sample.prompt" and equals and not _is_quoted(value)
    if prompt or (name == "model.extra_tokens" and _is_mapping(value)):
        return f"{key}={quoted(value)}"
    return argument


def _is_quoted(value: str) -> bool:
    return len(value) > 1 and value[0] == value[-1] and value[0] in "'\""


def _is_mapping(value: str) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except ValueError:
        return False
