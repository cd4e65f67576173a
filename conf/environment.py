"""What a configuration takes from the environment by ``${oc.env:X}`` is shown as that, wherever it would be shown.

The resolver notes each value that it gives. A plain configuration carries, under ``KEY``, which of its values these are
(``conf.instantiate.to_dict``), so that other processes of a run hide them too.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from types import TracebackType
from typing import Any, TextIO

from omegaconf import Container, OmegaConf
from omegaconf.resolvers import oc

from common.errors import format_exception

KEY = "from_environment"

# Neither is a secret in a text, where it may stand for something else: a small number, a word of YAML.
_HARMLESS = re.compile(r"-?\d{1,6}|true|false|null|none|", re.IGNORECASE)
_SHORT = 4  # characters; a shorter value is hidden where it is a word of its own

_expressions: dict[str, str] = {}  # by value
_given: list[str] = []  # values that the resolver gave, for ``used``


def register() -> None:
    """Put the resolver in the place of OmegaConf's own, and forget what an earlier run has noted."""
    _expressions.clear()
    OmegaConf.register_new_resolver("oc.env", _resolve, replace=True)
    hide_on_console()
    sys.excepthook = _print_exception


def _resolve(name: Any, *default: Any) -> Any:
    value = oc.env(name, *default)
    if str(name) in os.environ:
        note({value: f"${{oc.env:{name}}}"})
        _given.append(value)
    return value


def note(expressions: Mapping[str, str]) -> None:
    """Have values hidden in every text from now on.

    Args:
        expressions: What to show, by value.
    """
    _expressions.update(expressions)


def used(cfg: Container) -> dict[str, dict[str, str]]:
    """Find out what a configuration takes from the environment.

    Args:
        cfg: The configuration, with its interpolations.

    Returns:
        "shown": by dotted key, the text in the configuration that leads there; "values": expressions by value. Both
        are empty where nothing is taken.
    """
    shown, values = {}, {}
    for path, text in _interpolations(cfg, ""):
        shown[path] = text
        values |= {value: _expressions[value] for value in _given}
    return {"shown": shown, "values": values}


def _interpolations(node: Container, prefix: str) -> Iterable[tuple[str, str]]:
    texts = OmegaConf.to_container(node, resolve=False)
    for key in node if OmegaConf.is_dict(node) else range(len(node)):
        if OmegaConf.is_missing(node, key):
            continue
        _given.clear()
        value = node[key]
        if _given:
            yield f"{prefix}{key}", texts[key]
        elif OmegaConf.is_config(value):
            yield from _interpolations(value, f"{prefix}{key}.")


def shown(tree: dict) -> dict:
    """Return a copy of a plain configuration with the expressions in place of what they gave."""
    paths = tree.get(KEY, {}).get("shown", {})

    def copy(node: Any, path: str) -> Any:
        if path in paths:
            return paths[path]
        inner = f"{path}." if path else ""
        if isinstance(node, dict):
            return {key: copy(item, f"{inner}{key}") for key, item in node.items()}
        if isinstance(node, list):
            return [copy(item, f"{inner}{index}") for index, item in enumerate(node)]
        return node

    return copy({key: item for key, item in tree.items() if key != KEY}, "")


def hide(text: str) -> str:
    """Replace each value that was noted by its expression, also as it reads in a path, in quotes, and in JSON.

    Left as they are: numbers of up to six digits, true, false, null, and names of files that exist.
    """
    if text in _expressions:
        return _expressions[text]
    for value in sorted(_expressions, key=len, reverse=True):
        if _HARMLESS.fullmatch(value) or _exists(value):
            continue
        for form in {value, str(PurePath(value)), repr(value)[1:-1], json.dumps(value)[1:-1]}:
            if form in text:
                pattern = re.escape(form)
                if len(form) < _SHORT:
                    pattern = rf"(?<!\w){pattern}(?!\w)"
                text = re.sub(pattern, lambda _, value=value: _expressions[value], text)
    return text


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # a NUL byte
        return False


def hide_on_console() -> None:
    """Have all that this process prints from now on go through ``hide``."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Hiding):
            setattr(sys, name, _Hiding(stream))


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(hide(format_exception(error, trace)))


class _Hiding:
    """A text stream that hides values. Everything but ``write`` is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(hide(text) if _expressions else text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterable[str]:
        return iter(self._stream)
