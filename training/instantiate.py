"""The one door through which configuration becomes objects."""

from __future__ import annotations

from typing import Any

from training.errors import USER_ERRORS, TrainingError

ALLOWED = ("models.", "data.", "parallel.", "training.", "torch.nn.", "torch.optim.")


def instantiate(node: Any, **arguments: Any) -> Any:
    """``hydra.utils.instantiate`` for targets of this project's packages and of torch.nn and torch.optim.

    A configuration may come from anywhere, and a target can be any function: ``os.system`` too.
    Raises TrainingError for other targets, at any depth. A user's mistake that the target complains of comes out as
    it is, without Hydra's wrapping; a plain ValueError as a TrainingError.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydra_instantiate

    _check(node)
    try:
        return hydra_instantiate(node, **arguments)
    except InstantiationException as wrapped:
        cause = wrapped.__cause__
        if isinstance(cause, USER_ERRORS):
            raise cause from None
        if isinstance(cause, ValueError):
            raise TrainingError(str(cause)) from cause
        raise


def _check(node: Any) -> None:
    from omegaconf import ListConfig
    from omegaconf.basecontainer import BaseContainer

    if isinstance(node, (list, ListConfig)):
        for item in node:
            _check(item)
    elif isinstance(node, (dict, BaseContainer)):
        target = node.get("_target_")
        if target is not None and not _is_allowed(str(target)):
            raise TrainingError(
                f"_target_={target} is not allowed: configurations may build objects from "
                f"{', '.join(prefix.rstrip('.') for prefix in ALLOWED)} only"
            )
        for value in node.values():
            _check(value)


def _is_allowed(target: str) -> bool:
    """By its name, and by where it is defined: an allowed module has other modules among its names."""
    from hydra.utils import get_object

    if not target.startswith(ALLOWED):
        return False
    try:
        found = get_object(target)
    except Exception:
        return True  # there is none of that name: instantiating says so better
    return str(getattr(found, "__module__", "")).startswith(ALLOWED)
