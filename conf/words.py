"""The words of a command line: their keys and options, and how they are written for Hydra."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hydra._internal.utils import get_args_parser

from common.errors import UserError
from common.files import expand_home
from conf import CHOSEN, ON_TOP
from conf.instantiate import literal

GROUPS = (*CHOSEN, "parallel", "launcher", "logger")  # a run needs an option of each


def parse(arguments: Sequence[str]) -> Namespace:
    """Return the options and the ``overrides`` of a command line. Values are quoted where Hydra needs it.

    Raises:
        UserError: A word begins with a dash and is no option.
    """
    parsed, unknown = get_args_parser().parse_known_intermixed_args(list(arguments))
    if unknown:
        setting, value = unknown[0].lstrip("-"), "" if "=" in unknown[0] else "=VALUE"
        raise UserError(f"{unknown[0]}: settings are written without dashes: {setting}{value}")
    parsed.overrides = [quote_value(word) for word in parsed.overrides]
    return parsed


def config_folder(arguments: Sequence[str]) -> Path | None:
    """Return the folder of the user's options, ``--config-dir``; None without one."""
    folder = get_args_parser().parse_known_args(arguments)[0].config_dir
    return None if folder is None else expand_home(folder).absolute()


def code_folders(arguments: Sequence[str]) -> list[str]:
    """Return the folders that may have the user's code: ``--config-dir`` and its parent."""
    folder = config_folder(arguments)
    return [] if folder is None else [str(folder.parent), str(folder)]


def key_of(word: str) -> str:
    """Return the key of an override (``+a.b=1``: "a.b") or the group of an option (``logger@x.csv=csv``: "logger")."""
    return re.split(r"[=@]", word.lstrip("+~"))[0]


def expand_lists(arguments: Sequence[str]) -> list[str]:
    """Expand ``logger=[wandb,csv]`` and ``callbacks=[early_stop]`` to one option of its group per section.

    The first logger is the section ``logger``, the others ``loggers.NAME``; callbacks are ``callbacks.NAME``.
    ``experiment=null`` becomes ``~experiment``, as Hydra requires.

    Raises:
        UserError: A group that a run needs is null.
    """
    return [word for argument in arguments for word in _expand(argument)]


def _expand(argument: str) -> list[str]:
    group, _, option = argument.partition("=")
    if option == "null" and group in ON_TOP:
        return [f"~{group}"]
    if option == "null" and group in GROUPS:
        none = ", such as logger=none for none" if group == "logger" else ""
        raise UserError(f"{argument}: a run needs this section; leave it out or choose {group}=NAME{none}")
    match = re.fullmatch(r"(logger|callbacks)=(?:\[([\w,\s-]*)\]|([\w-]+))", argument)
    if match is None or argument in ("callbacks=null", "callbacks=[]") or (match[1] == "logger" and match[3]):
        return [argument]
    names = re.findall(r"[\w-]+", match[2] or match[3] or "") or ["none"]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{argument} names {repeated[0]} {names.count(repeated[0])} times; name each once")
    group, section = ("logger", "loggers") if match[1] == "logger" else ("callback", "callbacks")
    first = [f"logger={names.pop(0)}"] if group == "logger" else []
    return first + [f"+{group}@{section}.{name}={name}" for name in names]


def hydra_word(text: str) -> str:
    """Return ``text`` as the value of an override: quoted, unless it is a plain word or path."""
    return text if re.fullmatch(r"[\w./:%@+-]+", text, re.ASCII) else quoted(text)


def quoted(text: str) -> str:
    """Return ``text`` quoted for Hydra's grammar, in which a backslash escapes a quote and backslashes before it."""
    escaped = re.sub(r"(?<!\\)(\\*)('|\Z)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"


def quote_value(argument: str) -> str:
    """Return an argument with quotes around a value that Hydra's grammar would misread.

    ``sample.prompt=...`` is any text, unless the user has quoted it. ``sample.prompts=...`` is JSON, a list of texts.
    ``${`` is text in both. ``model.extra_tokens=...`` is JSON, ``{"<a>": "start of an entity"}``, because Hydra's
    mappings cannot have such keys.
    """
    key, equals, value = argument.partition("=")
    name = key.lstrip("+")
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    if name == "sample.prompt" and equals and not is_quoted:
        return f"{key}={quoted(literal(value))}"
    if name in ("sample.prompts", "model.extra_tokens"):
        with suppress(ValueError):
            content = json.loads(value)
            if isinstance(content, dict):
                return f"{key}={quoted(value)}"
            if isinstance(content, list) and all(isinstance(item, str) for item in content):
                return f"{key}=[{','.join(quoted(literal(item)) for item in content)}]"
    return argument
