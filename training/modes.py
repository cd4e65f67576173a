"""The modes that work on a checkpoint: ``eval`` under any strategy, ``export`` and ``sample`` in this one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import TrainingError
from launchers import World

ALONE = ("export", "sample")


def checkpoint_of(cfg: Any) -> Path:
    """What ``checkpoint=`` names: a checkpoint, or a run directory, whose newest is meant.

    Raises TrainingError where nothing is named. Whether one is there and whole is for who reads it.
    """
    if cfg.checkpoint is None:
        raise TrainingError(
            f"mode={cfg.mode} needs checkpoint=PATH: a run directory, or one of its checkpoints, such as "
            "RUN_DIR/checkpoints/latest"
        )
    return Path(cfg.checkpoint).expanduser()


def run_alone(cfg: Any, run_dir: Path, world: World | None) -> None:
    """Export or sample. A checkpoint holds the whole model, so neither ``parallel=`` nor ``launcher=`` matters."""
    if world is not None and world.size > 1:
        raise TrainingError(
            f"mode={cfg.mode} is one process and {world.size} were started (WORLD_SIZE): run it as python train.py …"
        )
    if cfg.mode == "export":
        from training.export import export

        print(export(cfg, run_dir), flush=True)
    else:
        from training.sample import sample

        print(sample(cfg), flush=True)
