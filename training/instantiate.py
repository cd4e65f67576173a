"""The one door through which configuration becomes objects."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from common.errors import TrainingError, UserError

ALLOWED = ("models.", "data.", "parallel.", "training.", "torch.nn.", "torch.optim.")
# A model may be built by a function: it only computes. Functions elsewhere also write files and start processes.
_FUNCTIONS = ("models.",)


def instantiate(node: Any, **arguments: Any) -> Any:
    """``hydra.utils.instantiate`` for public classes of this project, torch.nn and torch.optim, and models' functions.

    A configuration may come from anywhere, and a target can be any function: ``os.system`` too.
    Raises TrainingError for other targets, at any depth, before any of them is called. A user's mistake that the
    target complains of comes out as it is, without Hydra's wrapping; a plain ValueError as a TrainingError.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydra_instantiate

    _check(node)
    if _is_recursive(node):
        _check(arguments)  # Hydra would build what they name too
    try:
        return hydra_instantiate(node, **arguments)
    except InstantiationException as wrapped:
        cause = wrapped.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, ValueError):
            raise TrainingError(str(cause)) from cause
        raise


def _is_recursive(node: Any) -> bool:
    from omegaconf.basecontainer import BaseContainer

    return not isinstance(node, (dict, BaseContainer)) or "_recursive_" not in node or bool(node["_recursive_"])


def _check(node: Any) -> None:
    from omegaconf import ListConfig
    from omegaconf.basecontainer import BaseContainer

    if isinstance(node, (list, tuple, ListConfig)):
        for item in node:
            _check(item)
    elif isinstance(node, (dict, BaseContainer)):
        target = node.get("_target_")
        reason = _objection(target) if target is not None else None
        if reason is not None:
            raise TrainingError(
                f"_target_={target} is not allowed: {reason}. Configurations may build public classes of "
                f"{', '.join(prefix.rstrip('.') for prefix in ALLOWED)}, and call functions of "
                f"{', '.join(prefix.rstrip('.') for prefix in _FUNCTIONS)}, only"
            )
        for value in node.values():
            _check(value)


def _objection(target: Any) -> str | None:
    """Why ``target`` may not be built; None where it may. By its name, and by what the name leads to: an allowed
    module has other modules, and what they define, among its names."""
    if not isinstance(target, str) or not target.startswith(ALLOWED):
        return "it is of another package"
    if any(part.startswith("_") for part in target.split(".")):
        return "it is private"
    try:
        found = _resolve(target)
    except _Outside as outside:
        return f"it leads to {outside}"
    except (AttributeError, ModuleNotFoundError) as error:
        raise TrainingError(f"_target_={target} names nothing: {error}") from error
    home = f"{getattr(found, '__module__', None)}.{getattr(found, '__qualname__', found)}"
    if not inspect.isclass(found) and not isinstance(found, FunctionType):
        return "it is neither a class nor a function"
    if not home.startswith(ALLOWED):
        return f"it is {home}"
    if not inspect.isclass(found) and not home.startswith(_FUNCTIONS):
        return "it is a function"
    return None


class _Outside(Exception):
    """A name led to a module, whose name this holds, of another package."""


def _resolve(target: str) -> Any:
    """What Hydra would find under that name, without leaving the allowed packages on the way."""
    parts = target.split(".")
    found = import_module(parts[0])
    for end, part in enumerate(parts[1:], start=2):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            found = import_module(".".join(parts[:end]))
        else:
            found = getattr(found, part)
        if isinstance(found, ModuleType) and not f"{found.__name__}.".startswith(ALLOWED):
            raise _Outside(found.__name__)
    return found
