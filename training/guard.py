"""Keeps a new run from overwriting an old one, and a sweep from starting where it cannot run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from launchers import World
from training.report import METRICS


def refuse(message: str) -> NoReturn:
    """Leave with exit code 1. Hydra turns an exception of a callback into a warning; an exit it lets through."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(1)


class RunDirectoryGuard(Callback):
    """Looks at the run directory before Hydra writes its first file there. (A sweep's is looked at job by job.)"""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.run.dir)
        if config.train.resume is None and (folder / METRICS).exists():
            refuse(f"{folder} holds another run; choose another hydra.run.dir, or go on with it by train.resume=auto")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        world = World.detect()
        if world is not None and world.size > 1 and world.origin in ("torchrun", "environment"):
            refuse("a sweep starts its jobs' processes itself: run it as python train.py -m …, without torchrun")
