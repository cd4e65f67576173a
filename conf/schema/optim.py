"""The ``optim=`` options: torch's own, with weight decay on matrices only unless told otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore


@dataclass
class SGD:
    _target_: str = "torch.optim.SGD"
    lr: float = 0.05
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_vectors: bool = False  # weight decay on biases and norms too


@dataclass
class Adam:
    _target_: str = "torch.optim.Adam"
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_vectors: bool = False  # weight decay on biases and norms too


@dataclass
class AdamW:
    _target_: str = "torch.optim.AdamW"
    lr: float = 6e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_vectors: bool = False  # weight decay on biases and norms too


def register(store: ConfigStore) -> None:
    for name, node in {"sgd": SGD, "adam": Adam, "adamw": AdamW}.items():
        store.store(group="schema/optim", name=name, node=node)
