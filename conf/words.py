"""The words of a command line: from what a user types to what Hydra takes, and back.

Without Hydra: the ranks that record a command need not import it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from common.errors import UserError
from conf import OF_CHECKPOINT

_OPTIONAL = ("experiment", "debug")
_REQUIRED = ("model", "data", "optim", "scheduler", "parallel", "logger", "launcher")
_WITH_VALUE = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--cfg", "-c", "--package", "-p")


def options_first(arguments: Sequence[str]) -> list[str]:
    """The same words in an order that Hydra takes: it refuses options that stand between overrides."""
    options, overrides, before = [], [], ""
    for word in arguments:
        (options if word.startswith("-") or before in _WITH_VALUE else overrides).append(word)
        before = word
    return [*options, *overrides]


def expand_lists(arguments: Sequence[str]) -> list[str]:
    """``logger=[wandb,csv]`` and ``callbacks=[early_stop]`` as options of their groups, each in a section of its own.

    The first logger is the section ``logger``, the others ``loggers.NAME``; callbacks are ``callbacks.NAME``.
    ``experiment=null`` is none, which Hydra writes as ``~experiment``.

    Raises:
        UserError: A group that a run needs is null.
    """
    return [word for argument in arguments for word in _expand(argument)]


def as_typed(overrides: Sequence[str]) -> list[str]:
    """The reverse of what is done to a command line: what was typed, of the overrides that Hydra was given."""
    overrides = [re.sub(r"^([^=]+)=choice\((.*)\)$", r"\1=\2", override) for override in overrides]
    overrides = [f"{word[1:]}=null" if word[1:] in _OPTIONAL and word[0] == "~" else word for word in overrides]
    # In prompts a reference is text, for which OmegaConf wants a backslash.
    overrides = [_refer(word) if re.match(r"\+*sample[.=]", word) else word for word in overrides]
    overrides = [override for override in overrides if not override.startswith(f"{OF_CHECKPOINT}=")]
    words: list[str] = []
    names: dict[str, list[str]] = {"logger": [], "callbacks": []}
    for override in overrides:
        added = re.fullmatch(r"\+(?:schema/)?(logger|callback)@(?:loggers|callbacks)\.[\w-]+=([\w-]+)", override)
        if added is None:
            words.append(override)
        elif not override.startswith("+schema/"):
            names["logger" if added[1] == "logger" else "callbacks"].append(added[2])
    if names["logger"]:
        first = next((word.partition("=")[2] for word in words if word.startswith("logger=")), "wandb")
        words = [word for word in words if not word.startswith("logger=")]
        names["logger"].insert(0, first)
    return [*words, *(f"{key}=[{','.join(some)}]" for key, some in names.items() if some)]


def _refer(word: str) -> str:
    return re.sub(r"(?<!\\)(\\+)\$\{", lambda match: match[1][: len(match[1]) // 2] + "${", word)


def _expand(argument: str) -> list[str]:
    group, _, option = argument.partition("=")
    if option == "null" and group in _OPTIONAL:
        return [f"~{group}"]
    if option == "null" and group in _REQUIRED:
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
    # The schema stands before what it checks.
    return first + [f"+{part}{group}@{section}.{name}={name}" for name in names for part in ("schema/", "")]
