"""The one door through which configuration becomes objects."""

from __future__ import annotations

from typing import Any

from training.errors import TrainingError

ALLOWED = ("models.", "data.", "parallel.", "training.", "torch.nn.", "torch.optim.")


def instantiate(node: Any, **arguments: Any) -> Any:
    """``hydra.utils.instantiate`` for targets of this project's packages and of torch.nn and torch.optim.

    A configuration may come from anywhere, and a target can be any function: ``os.system`` too.
    Raises TrainingError for other targets, at any depth.
    """
    from hydra.utils import instantiate as hydra_instantiate

    _check(node)
    return hydra_instantiate(node, **arguments)


def _check(node: Any) -> None:
    from omegaconf import ListConfig
    from omegaconf.basecontainer import BaseContainer

    if isinstance(node, (list, ListConfig)):
        for item in node:
            _check(item)
    elif isinstance(node, (dict, BaseContainer)):
        target = node.get("_target_")
        if target is not None and not str(target).startswith(ALLOWED):
            raise TrainingError(
                f"_target_={target} is not allowed: configurations may build objects from "
                f"{', '.join(prefix.rstrip('.') for prefix in ALLOWED)} only"
            )
        for value in node.values():
            _check(value)
