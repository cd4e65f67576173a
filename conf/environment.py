"""What a configuration takes from the environment by ``${oc.env:X}`` is shown as that, wherever it would be shown.

The resolver notes the names of the variables. A plain configuration carries, under ``KEY``, which of its values were
taken from there (``conf.instantiate.to_dict``), so that other processes of a run show them in the same way.
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

# No secret in a text, where it may stand for something else: a small number, a word of YAML.
_HARMLESS = re.compile(r"-?\d{1,6}|true|false|null|none|", re.IGNORECASE)
_SHORT = 4  # characters; a shorter value is hidden where it is a word of its own
_REFERENCE = re.compile(r"\$\{oc\.env:([^,}]+)")

named: set[str] = set()  # of the variables that a configuration of this process has named


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
