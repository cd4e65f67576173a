"""Modules that are frozen in the first steps of a run (``train.unfreeze``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import TrainingError
from models.chain import Chain
from training.optimizer.groups import check_module, is_within


def frozen_until(unfreeze: Any, chain: Chain) -> dict[str, int]:
    """Return the last step in which parameters are frozen, by canonical name, of those that are frozen at first.

    A parameter in several modules, or tied to one, is frozen until the latest of their steps.

    Raises:
        TrainingError: A step is no whole number of at least 1, or the model has no such module to train.
    """
    if not isinstance(unfreeze or {}, Mapping):
        raise TrainingError(f"train.unfreeze={unfreeze} must be modules by step, such as {{20: [head, layer4]}}")
    named = chain.skeleton().named_parameters(remove_duplicate=False) if unfreeze else ()
    names, until = [name for name, parameter in named if parameter.requires_grad], {}
    for step, modules in (unfreeze or {}).items():
        if not str(step).isdecimal() or int(step) < 1:  # a checkpoint's configuration has strings
            raise TrainingError(f"train.unfreeze: {step!r} is not the number of a step, which counts from 1")
        for module in [modules] if isinstance(modules, (str, int)) else modules or ():
            check_module("train.unfreeze", module, names, "trained module")
            for name in {chain.canonical(name) for name in names if is_within(name, str(module))}:
                until[name] = max(int(step), until.get(name, 0))
    return until
