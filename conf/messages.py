"""Messages for errors that the user can act on; Hydra's are in one line, with the nearest key that exists."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher, get_close_matches

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigKeyError,
    ConfigTypeError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from common.errors import UserError, message_for_user


def explain(error: Exception) -> str | None:
    """Return the message about an error that the user can act on; None for one of the program's own.

    It is what ``message_for_user`` says. An exception of Hydra's or OmegaConf's becomes one line: the key, what it
    should be, and the nearest that exists.
    """
    if (message := message_for_user(error)) is not None:
        return message
    if isinstance(error.__cause__, UserError):  # of a resolver
        return message_for_user(error.__cause__)
    if isinstance(error, YAMLError):
        return f"a configuration file is no YAML that can be read: {' '.join(str(error).split())}. Correct it"
    if not isinstance(error, (HydraException, OmegaConfBaseException)):
        return None
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"there is no '{error.missing_cfg_file}'{_nearest(f'{group}={{}}', name, error.options)}"
    if isinstance(error, OverrideParseException):
        reason = _first_line(error.__cause__ or error).partition(" See ")[0]
        if error.override and "=" not in error.override and not error.override.startswith("~"):
            return f"{error.override!r} has no value: write {error.override}=VALUE"
        return f"{error.override!r} cannot be read: {reason}; put a value with special characters in quotes"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    place = _first_line(error).partition(":")[0] + ": " if str(error).startswith("In '") else ""
    if isinstance(cause, (ConfigKeyError, AttributeError)) and isinstance(cause.parent_node, DictConfig):
        return place + unknown_key(cause.full_key, [str(key) for key in cause.parent_node])
    if isinstance(cause, MissingMandatoryValue):
        return f"{place}{cause.full_key} has no default: set it"
    if isinstance(cause, ValidationError) and "is not a ListConfig" in str(cause):
        return f"{place}{cause.full_key} is a list: write {cause.full_key}=[…]"
    if isinstance(cause, ConfigTypeError) and "does not support deletion" in str(cause):
        return f"{cause.full_key} cannot be taken out; give it another value"
    if twice := re.match(r"Multiple values for (\S+)\. ", str(error)):
        return f"{twice[1]} is chosen already: type {twice[1]}=OPTION, without a +"
    if kinds := re.search(r"Merge error: \w+ is not a subclass of (\w+)\. value: (.*)", str(error)):
        return (
            f"{place}{kinds[2]} stands where the section '{kinds[1]}' has its keys; an option is chosen in the "
            "defaults list, such as '- override /model: gpt2'"
        )
    if isinstance(cause, ValidationError):
        return f"{place}{cause.full_key}: {_first_line(cause)}"
    return " ".join(str(error if cause is None else cause).split())


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Return the message about a key, such as "parallel.chnks", whose section has the keys ``known``."""
    section, dot, name = key.rpartition(".")
    section += dot
    if not known:
        lists = {"loggers.": f"type logger=[wandb,{name}] first", "callbacks.": f"type callbacks=[{name}] first"}
        return f"there is no key {key}; {lists.get(section, 'its section is empty')}"
    return f"there is no key {key}{_nearest(f'{section}{{}}', name, known)}"


def _nearest(form: str, name: str, known: Sequence[str]) -> str:
    """Return the most similar of the names that exist, and all of them."""
    close = get_close_matches(name, known)
    close = [one for one in known if one in close and _alike(one, name) == _alike(close[0], name)]
    guess = f"; did you mean {' or '.join(map(form.format, close))}?" if close else ";"
    return f"{guess} There are: {', '.join(known)}" if close else f"{guess} there are {', '.join(known)}"


def _alike(one: str, other: str) -> float:
    return SequenceMatcher(None, other, one).ratio()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
