"""Hides secrets in everything that a run writes or prints: configurations, command lines, log lines, errors.

A value from the environment, ``${oc.env:X}``, is shown as this reference: the resolver notes which variables are read.
Typed secrets are recognized by their names.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc
from yaml import YAMLError

MASK = "***"

_READ = "MASKED_VARIABLES"  # lists the variables that were read; child processes inherit it
_NAMES = r"(api[_-]?key|access[_-]?key|private[_-]?key|secret([_-]?key)?|(?<!tik)token|password|passwd|credentials?)"
_SECRET_NAME = re.compile(f"{_NAMES}$", re.IGNORECASE)
# A match begins only where a word begins: trying every letter of a long word would take quadratic time.
_URL_PASSWORD = re.compile(r"(?<!\w)(\w+://[^/\s:@]*:)[^/\s@]+@")
# `name=value`, `name: value` (inside {…}) and `--name=value`; a value ends before the next item of a list or mapping.
_ASSIGNMENT = re.compile(
    r"(?<![\w.\-])(?P<name>[\w.\-]+)(?P<sign>\s*[=:]\s*)(?P<value>'[^']*'|\"[^\"]*\"|[^,{}\[\]\s'\"]+)"
)
# Values that are not secrets: a vocabulary's `pad_token=0`, and words with another meaning in a text.
_HARMLESS = re.compile(r"-?\d{1,6}|true|false|null|none|\$?", re.IGNORECASE)
_SHORTEST = 8  # characters of a value that is a secret because of its variable's name alone


def _read() -> list[str]:
    return os.environ.get(_READ, "").split(",")


def _resolve(name: str, *default: Any) -> str | None:
    os.environ[_READ] = ",".join(sorted({*_read(), name}))
    return oc.env(name, *default)


OmegaConf.register_new_resolver("oc.env", _resolve, replace=True)


def hide(text: str) -> str:
    """Replace values of variables: by references if they were read, by ``***`` if only the variable's name is secret.

    Small numbers, words of YAML and existing files stay.
    """
    read = _read()
    for name, value in sorted(os.environ.items(), key=lambda item: -len(item[1])):  # one may be part of another
        known = name in read
        if len(value) > (3 if known else _SHORTEST - 1) and value in text and (known or _SECRET_NAME.search(name)):
            if not _HARMLESS.fullmatch(value) and not os.path.exists(value):
                text = text.replace(value, f"${{oc.env:{name}}}" if known else MASK)
    return text


def mask_secrets(value: Any) -> Any:
    """Replace secrets by ``***``, and values from the environment by ``${oc.env:NAME}``.

    A secret is recognized by its name (``api_key``), as the password in a URL, or as the value of an environment
    variable with such a name.

    Args:
        value: A nested dict or list, a command line as a list of words, or a text.

    Returns:
        ``value``, or a copy of it in which secrets are masked.
    """
    return _masked(value, "")


def _masked(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(item, name) for item in value]
    if _is_secret(name, str(value)):
        return MASK
    return _mask_text(value) if isinstance(value, str) else value


def _is_secret(name: str, value: str) -> bool:
    harmless = _HARMLESS.fullmatch(value) or value.startswith("${oc.env:")
    return bool(_SECRET_NAME.search(name)) and not harmless


def _mask_text(text: str) -> str:
    text = _URL_PASSWORD.sub(rf"\1{MASK}@", hide(text))
    return _ASSIGNMENT.sub(_mask_assignment, text)


def _mask_assignment(match: re.Match) -> str:
    return match["name"] + match["sign"] + MASK if _is_secret(match["name"], match["value"]) else match[0]


def mask_files(paths: list[Path]) -> None:
    """Mask secrets in YAML files. Files without secrets are left as they are; missing files are ignored."""
    for path in filter(Path.exists, paths):
        try:
            content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
            masked = mask_secrets(content)
            if masked != content:
                OmegaConf.save(OmegaConf.create(masked), path)
        except (OSError, ValueError, YAMLError) as error:
            # A secret that cannot be masked must not stay.
            path.unlink(missing_ok=True)
            print(f"warning: {path} could not be written again without its secrets: {error}", file=sys.stderr)
