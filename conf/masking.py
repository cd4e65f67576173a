"""Hides secrets in everything that a run writes or prints: configurations, command lines, log lines, errors.

What a configuration takes from the environment by ``${oc.env:X}`` is known exactly, and shown as that: the resolver
notes the names of the variables, and a plain configuration carries, under ``KEY``, which of its values were taken from
there (``conf.instantiate.to_dict``), so that other processes of a run show them in the same way. Secrets that were
typed are guessed by their names and forms.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

KEY = "from_environment"

_SHORT = 4  # characters; a shorter value is hidden where it is a word of its own
_REFERENCE = re.compile(r"\$\{oc\.env:([^,}]+)")

named: set[str] = set()  # of the variables that a configuration of this process has named

MASK = "***"

_NAMES = r"(api[_-]?key|access[_-]?key|private[_-]?key|secret([_-]?key)?|(?<!tik)token|password|passwd|credentials?)"
_SECRET_NAME = re.compile(f"{_NAMES}$", re.IGNORECASE)
# Keys as issuers write them: Hugging Face, OpenAI, GitHub, AWS, wandb (40 hex digits, or wandb_v1_…).
_SECRET_VALUE = re.compile(
    r"\b(hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{16}|wandb_v\d_\w{16,}"
    r"|(?<![/\w])[0-9a-f]{40}(?![/\w]))"
)
_SHORTEST_SECRET = 8  # characters; a shorter value of a variable may be an ordinary word
# Each begins where a word begins: in a long word, to begin at every letter would take a time that grows as its square.
_URL_PASSWORD = re.compile(r"(?<!\w)(\w+://[^/\s:@]*:)[^/\s@]+@")
# `name=value`, `name: value` (inside {…}) and `--name=value`; a value ends where a list or mapping goes on.
_ASSIGNMENT = re.compile(
    r"(?<![\w.\-])(?P<name>[\w.\-]+)(?P<sign>\s*[=:]\s*)(?P<value>'[^']*'|\"[^\"]*\"|[^,{}\[\]\s'\"]+)"
)
# No secrets: a vocabulary's `pad_token=0`, and what in a text may stand for something else.
_HARMLESS = re.compile(r"-?\d{1,6}|true|false|null|none|", re.IGNORECASE)


def register() -> None:
    """Put the resolver in the place of OmegaConf's own, and forget what an earlier run has named."""
    named.clear()
    OmegaConf.register_new_resolver("oc.env", _resolve, replace=True)


def _resolve(name: Any, *default: Any) -> Any:
    named.add(str(name))
    return oc.env(name, *default)


def taken(tree: Any, path: str = "") -> dict[str, str]:
    """Return the values of a tree, with its references, that name a variable, by dotted key."""
    if isinstance(tree, (dict, list)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {key: text for name, item in items for key, text in taken(item, f"{path}.{name}").items()}
    return {path[1:]: tree} if isinstance(tree, str) and _REFERENCE.search(tree) else {}


def note(references: Mapping[str, str]) -> None:
    """Have what variables hold hidden in every text from now on: those that ``taken`` has found."""
    named.update(name for text in references.values() for name in _REFERENCE.findall(text))


def shown(tree: dict) -> dict:
    """Return a copy of a plain configuration with the references in place of what they gave."""
    references = tree.get(KEY, {})
    note(references)

    def copy(node: Any, path: str) -> Any:
        if path[1:] in references:
            return references[path[1:]]
        if isinstance(node, dict):
            return {key: copy(item, f"{path}.{key}") for key, item in node.items()}
        return [copy(item, f"{path}.{index}") for index, item in enumerate(node)] if isinstance(node, list) else node

    return copy({key: item for key, item in tree.items() if key != KEY}, "")


def hide(text: str) -> str:
    """Replace what variables hold by their references; small numbers, words of YAML and existing files stay."""
    for name in named:
        value = os.environ.get(name, "")
        if _HARMLESS.fullmatch(value) or os.path.exists(value):
            continue
        for form in {value, str(PurePath(value))}:  # as it reads in a path
            whole = rf"(?<!\w){re.escape(form)}(?!\w)" if len(form) < _SHORT else re.escape(form)
            text = re.sub(whole, lambda _, name=name: f"${{oc.env:{name}}}", text) if form in text else text
    return text


# -- what is shown ----------------------------------------------------------------------------------------------------


def mask_secrets(value: Any, name: str = "") -> Any:
    """Replace secrets by ``***``, and what comes from the environment by ``${oc.env:NAME}``.

    A secret is known by its name (``api_key``), by its form (``hf_…``, a password in a URL), or because a variable of
    the environment with such a name holds it.

    Args:
        value: A nested dict or list, a command line as a list of words, or a text.
        name: The key under which ``value`` stands, if any.

    Returns:
        A copy of ``value``. Tuples become lists.
    """
    # What a leaf or its name holds where there is something to mask.
    suspects = [_NAMES, _URL_PASSWORD.pattern, _SECRET_VALUE.pattern, *map(re.escape, _secrets_of_environment())]
    return _masked(value, name, re.compile("|".join(suspects), re.IGNORECASE))


def _masked(value: Any, name: str, suspect: re.Pattern) -> Any:
    if isinstance(value, dict):
        value = shown(value) if KEY in value else value
        names = list(map(str, value))
    elif isinstance(value, (list, tuple)):
        names = [name] * len(value)
    elif name == "git_commit":  # forty hexadecimal digits, as a key of wandb has
        return value
    elif _is_secret(name, str(value)) and not str(value).startswith("${oc.env:"):
        return MASK
    else:
        return _mask_text(value) if isinstance(value, str) else value
    items = value.values() if isinstance(value, dict) else value
    masked = [
        _masked(item, key, suspect)
        if isinstance(item, (dict, list, tuple))
        or suspect.search(key)  # a number or null is nobody's secret, unless its name says so
        or (isinstance(item, str) and (named or suspect.search(item)))
        else item
        for key, item in zip(names, items, strict=True)
    ]
    return dict(zip(value, masked, strict=True)) if isinstance(value, dict) else masked


def _is_secret(name: str, value: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS.fullmatch(value)


def _mask_text(text: str) -> str:
    def mask_assignment(match: re.Match) -> str:
        secret = _is_secret(match["name"], match["value"]) and not text.startswith("${oc.env:", match.start("value"))
        return match["name"] + match["sign"] + MASK if secret else match[0]

    text = hide(text)
    for value in _secrets_of_environment() if len(text) >= _SHORTEST_SECRET else ():
        text = text.replace(value, MASK)
    text = _URL_PASSWORD.sub(rf"\1{MASK}@", text)
    text = _ASSIGNMENT.sub(mask_assignment, text)
    return _SECRET_VALUE.sub(MASK, text)


def _secrets_of_environment() -> list[str]:
    """Values that a shell may have put on the command line: ``"$WANDB_API_KEY"``."""
    return [
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name) and not os.path.exists(value)
    ]
