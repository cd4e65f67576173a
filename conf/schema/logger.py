"""Typed schema of the `logger` group: where a run is shown besides its own files."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Mode(Enum):
    """offline needs neither account nor network; online needs `wandb login` once."""

    offline = "offline"
    online = "online"


@dataclass
class Wandb:
    """Weights & Biases. `name` is the run's display name; null takes the one that the training gives it."""

    _target_: str = "training.reporting.WandbRun"
    # The run's whole configuration is an argument of the call: its own `_target_`s are data there.
    _recursive_: bool = False
    _convert_: str = "all"
    mode: Mode = Mode.offline
    project: str = "one-word-parallel"
    group: str | None = None
    name: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class NoLogger:
    """No logger: metrics.jsonl and summary.json only."""

    _target_: str = "training.reporting.NoLogger"
    _recursive_: bool = False
    _convert_: str = "all"


def register(store) -> None:
    """Put the group's schemas into `store`, a Hydra `ConfigStore`, as `schema/logger/wandb` and `…/none`."""
    store.store(group="schema/logger", name="wandb", node=Wandb)
    store.store(group="schema/logger", name="none", node=NoLogger)
