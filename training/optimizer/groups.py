"""torch's optimizers, built from a section, with the rate, the weight decay and the frozen steps of each parameter."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from common.errors import TrainingError
from conf import OWN_KEYS
from conf.instantiate import build, resolve
from models.chain import Chain
from models.sequential import MODULE


def build_optimizer(
    config: Mapping, parameters: list[tuple[str, Tensor]], fused: bool, place: str = "optim"
) -> torch.optim.Optimizer:
    """Build the optimizer of a section, with a group of parameters for each rate and weight decay.

    ``fused`` asks for one kernel for all of a group's parameters. ``place`` is the section's key, for messages.

    Raises:
        TrainingError: The optimizer refuses a value of the section.
    """
    arguments = {key: value for key, value in config.items() if key not in OWN_KEYS["optim"]}
    known = inspect.signature(resolve(config["_target_"])).parameters
    spared = ("weight_decay" in known or "weight_decay" in arguments) and not config["decay_vectors"]
    groups: dict[tuple[float, float | None], dict[str, Any]] = {}
    for name, parameter in parameters:
        # A parameter's rate is multiplied by the factors of all modules around it.
        factor = math.prod(rate for module, rate in (config["rates"] or {}).items() if is_within(name, module))
        decay = decay_of(name, spared and parameter.dim() < 2, config.get("decays") or {})
        group = {"params": [], "lr": config["lr"] * factor} | ({} if decay is None else {"weight_decay": decay})
        groups.setdefault((factor, decay), group)["params"].append(parameter)
    if fused and "fused" in known and arguments.get("fused") is None and not arguments.get("foreach"):
        arguments["fused"] = True
    try:
        return build(place, arguments, list(groups.values()))
    except TrainingError as error:
        hint = "; the others need one too: 'optim.others={_target_: torch.optim.AdamW, lr: 1e-3}'"
        raise TrainingError(f"optim: {error}{hint if '2D' in str(error) else ''}") from None
    except (IndexError, KeyError, TypeError, RuntimeError) as error:
        raise TrainingError(f"optim: {config['_target_']} cannot take these values: {error}") from error


def decay_of(name: str, spared: bool, decays: Mapping[str, float]) -> float | None:
    """Return a parameter's weight decay, which is that of the innermost module in ``decays``; None for the optimizer's.

    A parameter that is ``spared`` does not decay, unless a key of ``decays`` names the parameter itself.
    """
    around = {str(module): decay for module, decay in decays.items() if is_within(name, module)}
    # A number matches the outermost module.
    inner = max(around, key=lambda m: (not m.isdecimal(), f".{name}.".rindex(f".{m}.") + len(m), len(m)), default=None)
    if spared and not (inner is not None and f".{name}".endswith(f".{inner}")):
        return 0.0
    return None if inner is None else around[inner]


def is_within(name: str, module: str) -> bool:
    """Return whether a parameter is in a module: ``h.0.attn.weight`` is in ``h.0`` and in ``attn``.

    A module whose name is a number (a child of an ``nn.Sequential``) matches only at the beginning of the name.
    """
    if str(module).isdecimal():
        return name.removeprefix(f"{MODULE}.").startswith(f"{module}.")
    return f".{module}." in f".{name}."


def check_module(key: str, module: Any, names: Sequence[str], what: str = "module") -> None:
    """Check that a module which ``key`` names has some of the parameters ``names``. Raises TrainingError."""
    if not isinstance(module, (str, int)) or isinstance(module, bool):  # YAML reads 1.10 as 1.1, and no as false
        raise TrainingError(
            f"{key}: a key is read as {module!r}: write '1.10' with quotes in a file, or name the module's "
            "parameters, which is possible in a command, too: {1.10.weight: 0.1}"
        )
    if not any(is_within(name, str(module)) for name in names):
        parts = sorted({part for name in names for part in name.split(".")[:-1]})
        known = [part for part in parts if not part.isdecimal()] or parts
        raise TrainingError(f"{key}: the model has no {what} {module!r}; it has {', '.join(known)}")


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
