"""The ``scheduler=`` options: the learning rate as a function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hydra.core.config_store import ConfigStore


class Unit(Enum):
    step = "step"
    epoch = "epoch"


@dataclass
class Constant:
    _target_: str = "training.lr.Constant"


@dataclass
class Step:
    _target_: str = "training.lr.Step"
    every: int = 1
    unit: Unit = Unit.epoch
    gamma: float = 0.95


@dataclass
class CosineWarmup:
    _target_: str = "training.lr.CosineWarmup"
    warmup_steps: int | None = None  # null: a fifth of the run
    min_ratio: float = 0.1  # of the peak, that the rate comes down to


def register(store: ConfigStore) -> None:
    for name, node in {"constant": Constant, "step": Step, "cosine_warmup": CosineWarmup}.items():
        store.store(group="schema/scheduler", name=name, node=node)
