"""Messages of errors that the user can act on. An error of Hydra is one line with the nearest existing key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from common.errors import UserError, message_for_user
from conf import keys_of, options


def explain(error: BaseException) -> str | None:
    """Return the message of an error that the user can act on; None for a bug.

    It is that of ``message_for_user``. For an exception of Hydra or OmegaConf it is one line: the key, its type, and
    the nearest existing key.
    """
    if (message := message_for_user(error)) is not None:
        return message
    if isinstance(error.__cause__, UserError):  # raised by a resolver
        return message_for_user(error.__cause__)
    if isinstance(error, OverrideParseException):
        reason = _one_line(error.__cause__ or error).partition(" See ")[0]
        return (
            f"{error.override!r} cannot be read: {reason}; write KEY=VALUE, and quote a value with special characters"
        )
    if not isinstance(error, (HydraException, OmegaConfBaseException, YAMLError)):
        return None
    if interrupt_in(error) is not None:
        return "stopped by SIGINT"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"there is no '{error.missing_cfg_file}'{nearest(f'{group}={{}}', name, error.options)}"
    if twice := re.match(r"Multiple values for (\S+)\. To override a value use '(.*: (.*))'", str(error)):
        typed = f"{twice[1]}={twice[3]}"
        return f"{twice[1]} has an option already: drop the plus of +{typed} (in a file: {twice[2]})"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    if cause is None or not cause.full_key:
        return _one_line(error)
    file = str(error).partition(":")[0] + ": " if str(error).startswith("In '") else ""
    if isinstance(cause, (ConfigKeyError, AttributeError)) and isinstance(cause.parent_node, DictConfig):
        known = [str(key) for key in cause.parent_node if key != "_target_"]
        group, _, key = cause.full_key.partition(".")
        if having := [f"{group}={option}" for option in options(group) if key in keys_of(group, option)]:
            return f"{file}there is no key {cause.full_key}; it is a key of {', '.join(having)}"
        of_part = re.fullmatch(r"data\.parts\.([^.]+)\.([^.]+)", cause.full_key)
        option = str(cause.parent_node.get("name", of_part[1])) if of_part else ""
        if of_part and option in options("data") and of_part[2] in keys_of("data", option):
            return f"{file}there is no key {cause.full_key} yet; type +{cause.full_key}=, or add it to data.parts={{…}}"
        return file + unknown_key(cause.full_key, known, _elsewhere(cause.parent_node, cause.full_key))
    return f"{file}{cause.full_key}: {str(cause).splitlines()[0]}"


def interrupt_in(error: BaseException | None) -> BaseException | None:
    """Return the interrupt that an error hides: OmegaConf may raise another error after it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


def unknown_key(key: str, known: Sequence[str], elsewhere: Sequence[str] = ()) -> str:
    """Return the message about a key that does not exist.

    Args:
        key: The key, such as "parallel.chnks".
        known: The keys of its section.
        elsewhere: Keys of other sections with its name.
    """
    section, dot, name = key.rpartition(".")
    section += dot
    if not known:
        lists = {
            "loggers.": f"type logger=[wandb,{name}] first",
            "callbacks.": f"type callbacks=[{name}] first",
            "model.settings.": f"type +{key}=",
        }
        return f"there is no key {key}; {lists.get(section, 'its section is empty')}"
    if elsewhere:
        return f"there is no key {key}; did you mean {' or '.join(elsewhere)}?"
    return f"there is no key {key}{nearest(f'{section}{{}}', name, known)}"


def nearest(form: str, name: str, known: Sequence[str]) -> str:
    """Return the end of a message: the most similar existing names, and all existing names."""
    lower, name = {option.lower(): option for option in known}, name.lower()
    alike = [name] if name in lower else get_close_matches(name, lower, n=2, cutoff=0.7)
    guess = " or ".join(form.format(lower[match]) for match in alike)
    return f"; did you mean {guess}? There are: {', '.join(known)}" if guess else f"; there are {', '.join(known)}"


def _elsewhere(section: DictConfig, key: str) -> list[str]:
    """Return the keys of other sections with the name of ``key``: "optim.lr" for "train.lr"."""
    name = key.rpartition(".")[2]
    tree: Any = OmegaConf.to_container(section._get_root())  # private: Hydra's error has no configuration (2.3.1)
    sections = {str(other): keys for other, keys in tree.items() if isinstance(keys, dict) and other != "hydra"}
    return [f"{other}.{name}" for other, keys in sections.items() if name in keys]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
