"""Checks of the section ``optim``, before anything is built for a run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from common.errors import PlanError, TrainingError
from conf.instantiate import target_of
from models.chain import Chain
from parallel.plan import Plan
from parallel.strategies import names_where
from training.optimizer.groups import build_optimizer, check_module, is_within
from training.optimizer.kinds import ELEMENTWISE, PER_PARAMETER, update_of
from training.optimizer.muon import hidden_matrices


def check_optimizer(config: Mapping[str, Any]) -> None:
    """Build the optimizers of the section ``optim`` for a parameter of one element, before anything else is built.

    Raises:
        TrainingError: An optimizer has no learning rate, or refuses a value of the section, such as a negative one.
    """
    for place, section in (("optim", config), ("optim.others", config.get("others"))):
        if not section:
            continue
        kind = target_of("optim", section)
        if section is not config and (twice := {"decay_vectors", "rates", "decays", "others"} & section.keys()):
            key = min(twice)
            raise TrainingError(f"optim.others.{key} has no effect: optim.{key} applies to both optimizers")
        if config.get("decays") and "weight_decay" not in {*section, *inspect.signature(kind).parameters}:
            raise TrainingError(f"optim.decays has no effect: {section['_target_']} has no weight decay")
        if section.get("update") is not None and update_of({**section, "update": None}) is not None:
            raise TrainingError(f"{place}.update has no effect: it is for optimizers not of torch. Leave it out")
        if "lr" not in section:
            raise TrainingError(f"optim: {section['_target_']} needs a learning rate (lr), which the schedule changes")
        if type(lr := section["lr"]) not in (int, float) or not math.isfinite(lr):
            raise TrainingError(f"{place}.lr={lr!r} must be a finite number, such as 1e-3: {section['_target_']}")
        if lr == 0 and section is config and config.get("others"):
            raise TrainingError("optim.lr=0: the rate of optim.others follows optim.lr; set optim.lr to a small number")
        for key, value in section.items():  # torch refuses values below 0, but NaN is not below 0
            numbers = value if isinstance(value, Sequence) else [value]
            if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
                raise TrainingError(f"{place}.{key}={value} must be finite: {section['_target_']}")
        closure = inspect.signature(getattr(kind, "step", kind)).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TrainingError(
                f"optim: {section['_target_']} evaluates the loss several times per step (a closure), which training "
                "in micro-batches does not; use another optimizer"
            )
        one = ("", nn.Parameter(torch.zeros(1, 1)))
        tried = {"decay_vectors": True, **section, "rates": None, "decays": None}
        build_optimizer(tried, [one], fused=False, place=place)


def check_layout(config: Mapping[str, Any], plan: Plan, chain: Chain) -> None:
    """Check that the section's optimizers can work on each rank's part of the model.

    Raises:
        PlanError: An optimizer may depend on all parameters at once, and the layout splits them.
    """
    copies = len(plan.stages) > 1 and chain.tied  # two stages may have the same tied parameter
    if plan.divides_model or copies:
        check_apart(config, plan.strategy)


def check_apart(config: Mapping[str, Any], strategy: str) -> None:
    """Check that the section's optimizers can work with a strategy that gives no rank the whole model.

    Raises:
        PlanError: An optimizer may depend on all parameters at once.
    """
    whole = names_where(stages=False, shards="", gpu_only=False, degree="")
    ways_out = " or ".join(f"parallel={name}" for name in whole)
    for section in filter(None, (config, config.get("others"))):
        if update_of(section) not in (ELEMENTWISE, PER_PARAMETER):
            raise PlanError(
                f"optim: {section['_target_']} may compute one number from all parameters (as Prodigy does), and "
                f"parallel={strategy} gives no rank the model in one piece. If it does not, add to its section "
                "'update: elementwise' if the update of an element depends only on the gradients of that element "
                f"(Lion), or 'update: per_parameter' if on those of its tensor (LAMB). Otherwise use {ways_out}"
            )


def check_others(config: Mapping[str, Any], chain: Chain) -> None:
    """Check that a model has matrices of hidden layers if the optimizer updates only these. Raises TrainingError."""
    if config.get("others") is not None and not hidden_matrices(chain):
        kind, others = (section["_target_"] for section in (config, config["others"]))
        raise TrainingError(
            f"optim: {kind} is for the matrices of hidden layers, and this model trains none. Embeddings, the output "
            f"layer, convolutions, biases and norms use {others} (optim.others). Use that alone, such as optim=adamw"
        )


def check_by_module(key: str, numbers: Mapping[str, float] | None, chain: Chain, example: str) -> None:
    """Check a section ``key`` of numbers by module.

    Raises:
        TrainingError: A number is below 0, or a module has no parameters. The message may have the ``example``.
    """
    if not isinstance(numbers or {}, Mapping):
        raise TrainingError(f"{key}={numbers} must be {example}")
    names = [name for name, _ in chain.skeleton().named_parameters()]
    for module, number in (numbers or {}).items():
        tied = next((owner for alias, owner in chain.tied.items() if is_within(alias, str(module))), None)
        if tied is not None and not any(is_within(name, str(module)) for name in names):
            raise TrainingError(f"{key}: all parameters of {module} are tied to others; name the module of {tied}")
        check_module(key, module, names)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            raise TrainingError(f"{key}.{module}={number} must be a number of at least 0, and finite")
