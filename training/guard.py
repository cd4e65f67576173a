"""Keeps a new run from overwriting an old one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from training.report import METRICS


class RunDirectoryGuard(Callback):
    """Looks at the run directory before Hydra writes its first file there."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        _refuse(config, Path(config.hydra.run.dir), METRICS, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _refuse(config, Path(config.hydra.sweep.dir), f"*/{METRICS}", "hydra.sweep.dir")


def _refuse(config: DictConfig, folder: Path, pattern: str, key: str) -> None:
    if config.train.resume is None and any(folder.glob(pattern)):
        # Hydra turns an exception of a callback into a warning; an exit it lets through.
        print(
            f"error: {folder} holds another run; choose another {key}, or go on with it by train.resume=auto",
            file=sys.stderr,
        )
        raise SystemExit(1)
