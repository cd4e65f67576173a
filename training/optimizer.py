"""The optimizer over this rank's share of the parameters, and the learning-rate schedules.

A schedule is a class with a method ``factor(step, total, per_epoch)``: the factor on ``optim.lr`` for a step, counted
from 1, of ``total`` steps with ``per_epoch`` to an epoch. It is a pure function, so that resuming needs no state of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from common.errors import TrainingError
from conf.schema import own_keys
from models.chain import Chain
from parallel.rows import local, rows_in
from parallel.strategy import Strategy
from training.config import instantiate, resolve

_FUSED = ("cpu", "cuda", "mps")


class Optimizer:
    """The optimizer of a configuration over what this rank holds; does nothing on a rank without parameters.

    Weight decay acts on matrices; biases and the scales of norms are left out unless ``decay_vectors``. ``rates`` has
    factors on the learning rate of the parameters of some modules. Where the section has ``others``, a second optimizer
    has all parameters that are not matrices, for an optimizer that is made for matrices (Muon). One fused kernel
    updates all parameters of one rate where the optimizer and the device have it.

    Args:
        config: The section ``optim`` as plain data.
        strategy: Whose parameters to optimize.

    Attributes:
        base_lr: The learning rate that a schedule's factor applies to.
        kind: The optimizer's ``_target_``.
    """

    def __init__(self, config: Mapping[str, Any], strategy: Strategy) -> None:
        self.base_lr: float = config["lr"]
        self.kind: str = config["_target_"]
        parameters = [(name, p) for name, p in strategy.named_parameters() if p.requires_grad]
        fused = strategy.device.type in _FUSED and all(s.device == strategy.device for s in strategy.stages)
        if config["others"] is None:
            parts = [(config, parameters)]
        else:
            matrices = [(name, p) for name, p in parameters if p.dim() == 2]
            rest = [(name, p) for name, p in parameters if p.dim() != 2]
            parts = [(config, matrices), (config["others"], rest)]
        shared = {key: config[key] for key in ("decay_vectors", "rates")}
        self._torch = [_build({**part, **shared}, own, fused) for part, own in parts if own]
        # Learning rates follow one schedule, each in proportion to its own.
        for optimizer in self._torch:
            for group in optimizer.param_groups:
                group["ratio"] = group["lr"] / self.base_lr if self.base_lr else 1.0

    def step(self, lr: float) -> None:
        """Update the parameters once at learning rate ``lr``."""
        for optimizer in self._torch:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["ratio"]
            optimizer.step()

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's tensors for one parameter, such as exp_avg; empty before the first step."""
        return {key: value for one in self._torch for key, value in one.state.get(parameter, {}).items()}

    def load_state_of(self, parameter: torch.nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Replace those tensors. ``step`` counters stay on the device where torch keeps them.

        Args:
            parameter: A parameter of this rank.
            state: Whole tensors, or what gives rows of them; of shared parameters, this rank's rows are taken.

        Raises:
            ValueError: One of them does not hold floating-point numbers, as those of torch's optimizers do.
        """
        for optimizer in self._torch:
            for group in optimizer.param_groups:
                if any(parameter is own for own in group["params"]):
                    placed = {key: _placed_as(parameter, key, value, group) for key, value in state.items()}
                    for key, value in placed.items():
                        if not value.is_floating_point():
                            raise ValueError(f"{key} of the optimizer holds {value.dtype}, not floating-point numbers")
                    optimizer.state[parameter] = placed


def _build(config: Mapping, parameters: list[tuple[str, Tensor]], fused: bool) -> torch.optim.Optimizer:
    arguments = _arguments(config)
    known = inspect.signature(resolve(config["_target_"])).parameters
    spared = "weight_decay" in known and not config["decay_vectors"]
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in parameters:
        key = factor, decays = _factor(name, config["rates"] or {}), parameter.dim() >= 2 or not spared
        group = {"params": [], "lr": config["lr"] * factor} | ({} if decays else {"weight_decay": 0.0})
        groups.setdefault(key, group)["params"].append(parameter)
    if fused and "fused" in known and arguments.get("fused") is None:
        # torch has no rule for a fused SGD over shares. Those it knows take one kernel per step all the same.
        shared = any(local(parameter) is not parameter for _, parameter in parameters)
        arguments["foreach" if shared and resolve(config["_target_"]) is torch.optim.SGD else "fused"] = True
    try:
        return instantiate(arguments, list(groups.values()))
    except TrainingError as error:
        raise TrainingError(
            f"optim: {error}. An optimizer that is made for matrices leaves the other parameters to a second one: "
            "'optim.others={_target_: torch.optim.AdamW, lr: 1e-3}'"
        ) from None


def _factor(name: str, rates: Mapping[str, float]) -> float:
    """The factor on the learning rate of the parameter ``name``: the product of those whose module it is in."""
    return math.prod(factor for module, factor in rates.items() if _is_in(name, module))


def _is_in(name: str, module: str) -> bool:
    return f".{module}." in f".{name}."


def _placed_as(parameter: torch.nn.Parameter, key: str, value: Tensor, group: Mapping[str, Any]) -> Tensor:
    """On the parameter's device, in its memory order: fused kernels walk both side by side. Of a share, its rows."""
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return value[...].cpu().clone()  # read by the host in every update
    if value.shape != parameter.shape:
        return value[...].to(parameter.device)
    own = rows_in(value, parameter)
    state = torch.empty_like(parameter, dtype=own.dtype, requires_grad=False)
    local(state).copy_(own)
    return state


def _arguments(config: Mapping) -> dict[str, Any]:
    """The section ``optim`` as its target takes it."""
    return {key: value for key, value in config.items() if key not in own_keys("optim")}


def check_optimizer(config: Mapping[str, Any]) -> None:
    """Check the section ``optim`` before anything is built.

    Raises:
        TrainingError: Where the optimizer refuses the section's numbers, such as a negative learning rate, has no
            learning rate, or asks for a closure.
    """
    for section in filter(None, (config, config["others"])):
        kind = resolve(section["_target_"])
        if "lr" not in section:
            raise TrainingError(f"optim: {section['_target_']} needs a learning rate (lr), which the schedule changes")
        closure = inspect.signature(kind.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TrainingError(
                f"optim: {section['_target_']} evaluates the loss several times per step (a closure), which a pipeline "
                "cannot; use another optimizer"
            )
        try:
            instantiate(_arguments(section), _Unread())
        except _Accepted:
            pass
        except TrainingError as error:
            others = "unexpected keyword" in str(error)
            hint = ": a key of another optimizer; one more optimizer is a file conf/optim/NAME.yaml (docs/extending.md)"
            raise TrainingError(f"optim: {error}{hint if others else ''}") from None


def check_rates(rates: Mapping[str, float] | None, chain: Chain) -> None:
    """Check the factors on the learning rate, ``optim.rates``.

    Raises:
        TrainingError: The model has no parameter in one of the modules, or a factor is no number or negative.
    """
    if rates is None:
        return
    if not isinstance(rates, Mapping):
        raise TrainingError(f"optim.rates={rates} must be factors by module, such as {{fc: 10, layer4.0: 0.1}}")
    names = [name for name, _ in chain.skeleton().named_parameters()]
    for module, factor in rates.items():
        if not isinstance(factor, (int, float)) or factor < 0:
            raise TrainingError(f"optim.rates.{module}={factor} must be a number of at least 0")
        if not any(_is_in(name, module) for name in names):
            known = sorted({part for name in names for part in name.split(".")[:-1] if not part.isdecimal()})
            raise TrainingError(f"optim.rates: the model has no module {module!r}; it has {', '.join(known)}")


class _Accepted(Exception):
    """The optimizer has checked the numbers and went on to the parameters."""


class _Unread:
    """Parameters that are never read: to take a real one, torch imports its compiler (0.8 s)."""

    def __iter__(self) -> NoReturn:
        raise _Accepted


class Constant:
    """The same learning rate throughout."""

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """1 in every step."""
        return 1.0


class Step:
    """Multiplied by ``gamma`` after every ``every`` epochs or steps (torch's StepLR).

    Args:
        every: Length of a period, in units.
        unit: "step" or "epoch".
        gamma: Factor from one period to the next.

    Raises:
        TrainingError: For a period below 1.
    """

    def __init__(self, every: int = 1, unit: Literal["step", "epoch"] = "epoch", gamma: float = 0.95) -> None:
        if every < 1:
            raise TrainingError(f"scheduler.every={every} must be at least 1")
        self.every, self.unit, self.gamma = every, unit, gamma

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """``gamma`` to the power of the number of periods that are over."""
        period = self.every * (per_epoch if self.unit == "epoch" else 1)
        return self.gamma ** ((step - 1) // period)


class CosineWarmup:
    """Linear from 1/warmup_steps to 1, then half a cosine down to ``min_ratio`` (GPT-3's schedule, as in nanoGPT).

    Args:
        warmup_steps: Length of the linear part, in steps. None: ``warmup_ratio`` of the run.
        min_ratio: What the factor falls towards, in [0, 1].
        warmup_ratio: The linear part as a fraction of the run, in [0, 1].

    Raises:
        TrainingError: For numbers outside of these ranges.
    """

    def __init__(self, warmup_steps: int | None = None, min_ratio: float = 0.1, warmup_ratio: float = 0.2) -> None:
        in_range = 0.0 <= min_ratio <= 1.0 and 0.0 <= warmup_ratio <= 1.0
        if (warmup_steps is not None and warmup_steps < 0) or not in_range:
            raise TrainingError(
                f"scheduler.warmup_steps={warmup_steps} must be 0 or more, and scheduler.min_ratio={min_ratio} and "
                f"scheduler.warmup_ratio={warmup_ratio} in [0, 1]"
            )
        self.warmup_steps, self.min_ratio, self.warmup_ratio = warmup_steps, min_ratio, warmup_ratio

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        """In [0, 1]; 1 at the end of the warm-up."""
        warmup = round(total * self.warmup_ratio) if self.warmup_steps is None else self.warmup_steps
        if step <= warmup:
            return step / warmup
        done = (step - 1 - warmup) / max(1, total - warmup)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
