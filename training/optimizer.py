"""The optimizer over this rank's share of the parameters, and its state under global names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NoReturn

import torch
from torch import Tensor

from common.errors import TrainingError
from parallel.strategy import Strategy
from training.config import instantiate

_FUSED = ("cpu", "cuda", "mps")
_OURS = ("decay_vectors",)  # keys of the configuration that torch does not know


class Optimizer:
    """torch's optimizer ``config`` over what this rank holds; does nothing on a rank without parameters.

    Weight decay acts on matrices; biases and the scales of norms are left out unless ``decay_vectors``. One fused
    kernel updates all parameters where the device has it.
    """

    def __init__(self, config: Mapping, strategy: Strategy) -> None:
        self.base_lr = config["lr"]
        self.kind = config["_target_"]
        everywhere = config["decay_vectors"]
        parameters = [p for p in strategy.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if everywhere or p.dim() >= 2]},
            {"params": [p for p in parameters if not everywhere and p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        node = torch_arguments(config)
        if strategy.device.type in _FUSED and all(s.device == strategy.device for s in strategy.stages):
            node["fused"] = True
        self._torch = instantiate(node, _partial_=True)(groups) if groups else None

    def step(self, lr: float) -> None:
        """One update at learning rate ``lr``."""
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = lr
            self._torch.step()

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's tensors for one parameter, such as exp_avg; empty before the first step."""
        return dict(self._torch.state.get(parameter, {})) if self._torch is not None else {}

    def load_state_of(self, parameter: torch.nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Replace those tensors. ``step`` counters stay on the device where torch keeps them."""
        if self._torch is not None:
            self._torch.state[parameter] = {key: _placed_as(parameter, key, v) for key, v in state.items()}


def _placed_as(parameter: torch.nn.Parameter, key: str, value: Tensor) -> Tensor:
    """On the parameter's device, in its memory order: fused kernels walk both side by side."""
    if key == "step" and parameter.device.type == "cpu":
        return value.clone()
    if value.shape != parameter.shape:
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def torch_arguments(config: Mapping) -> dict:
    """The section ``optim`` as torch's optimizer takes it."""
    return {key: value for key, value in config.items() if key not in _OURS}


def check_optimizer(config: Mapping) -> None:
    """Raise TrainingError where torch refuses the section's numbers, such as a negative learning rate."""
    try:
        instantiate(torch_arguments(config), _partial_=True)(_Unread())
    except _Accepted:
        pass
    except ValueError as error:
        raise TrainingError(f"optim: {error}") from None


class _Accepted(Exception):
    """torch was done with the numbers and went on to the parameters."""


class _Unread:
    """Parameters that nobody gets to see: to take a real one, torch imports its compiler (0.8 s)."""

    def __iter__(self) -> NoReturn:
        raise _Accepted


class Constant:
    """The same rate throughout."""

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        return 1.0


class Step:
    """Multiplied by ``gamma`` after every ``every`` epochs or steps (torch's StepLR)."""

    def __init__(self, every: int = 1, unit: Literal["step", "epoch"] = "epoch", gamma: float = 0.95) -> None:
        if every < 1:
            raise TrainingError(f"scheduler.every={every} must be at least 1")
        self.every, self.unit, self.gamma = every, unit, gamma

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        period = self.every * (per_epoch if self.unit == "epoch" else 1)
        return self.gamma ** ((step - 1) // period)


class CosineWarmup:
    """Linear from 1/warmup_steps to 1, then half a cosine down to ``min_ratio`` (GPT-3's schedule, as in nanoGPT).

    ``warmup_steps`` None: a fifth of the run.
    """

    def __init__(self, warmup_steps: int | None = None, min_ratio: float = 0.1) -> None:
        if (warmup_steps is not None and warmup_steps < 0) or not 0.0 <= min_ratio <= 1.0:
            raise TrainingError(
                f"scheduler.warmup_steps={warmup_steps} must be 0 or more and scheduler.min_ratio={min_ratio} in [0, 1]"
            )
        self.warmup_steps, self.min_ratio = warmup_steps, min_ratio

    def factor(self, step: int, total: int, per_epoch: int) -> float:
        warmup = total // 5 if self.warmup_steps is None else self.warmup_steps
        if step <= warmup:
            return step / warmup
        done = (step - 1 - warmup) / max(1, total - warmup)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
