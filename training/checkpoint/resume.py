"""Resuming a run: which checkpoint it continues from, and what that checkpoint knows of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from parallel.strategy import Strategy
from training.checkpoint.commit import set_current
from training.checkpoint.load import load, locate, newest, newest_whole, read_manifest
from training.checkpoint.manifest import Optimizer
from training.checkpoint.save import Checkpoints

AUTO = "auto"


@dataclass
class Resumed:
    """What a run continues from.

    Attributes:
        step: The last step that is done; 0 for none.
        progress: What the training loop has saved of itself.
        path: The checkpoint; None for a run that starts from the beginning.
    """

    step: int = 0
    progress: dict = field(default_factory=dict)
    path: Path | None = None


def resume(wanted: str | None, checkpoints: Checkpoints, strategy: Strategy, optimizer: Optimizer) -> Resumed:
    """Loads the checkpoint that ``train.resume`` names. All ranks call it; rank 0 chooses and prints.

    Args:
        wanted: A path; "auto" for the newest checkpoint of this run directory that is whole, bit for bit (a warning
            names the damaged ones); None for a new run.
        checkpoints: The checkpoints of this run directory.
        strategy: The model to load into.
        optimizer: Its optimizer.

    Returns:
        What was loaded.

    Raises:
        CheckpointError: On every rank: the checkpoint that was named is damaged, or does not fit.
    """
    if wanted is None:
        return Resumed()
    path = problem = None
    if strategy.mesh.rank == 0:
        try:
            path = _choose(wanted, checkpoints.folder)
        except CheckpointError as error:
            problem = str(error)
    problem, chosen = strategy.mesh.gather((problem, path and str(path)))[0]
    if problem is not None:
        raise CheckpointError(problem)
    path = None if chosen is None else Path(chosen)
    resumed = Resumed()
    if path is not None:
        step = load(path, strategy, optimizer, verified=True)
        resumed = Resumed(step, read_manifest(path).get("progress", {}), path)
    if path is None or path.parent == checkpoints.folder.resolve():
        if strategy.mesh.rank == 0 and checkpoints.folder.is_dir():
            say = _warn if wanted != AUTO else lambda text: None  # the damaged ones have been named already
            try:
                set_current(checkpoints.folder, path, resumed.progress.get("best_step"), say)
            except OSError as error:
                _warn(f"{checkpoints.folder} cannot be changed: {error}")
        if path is not None:
            checkpoints.resumed_from(path)
    return resumed


def _choose(wanted: str, folder: Path) -> Path | None:
    if wanted != AUTO:
        path = locate(Path(wanted))
    else:
        path = newest_whole(folder, lambda why: _warn(f"{why}; it is not used, and kept as unused-…"))
    if path is None:
        print(f"train.resume=auto: no checkpoint in {folder} to go on from; this run starts at step 1", flush=True)
        return None
    print(f"going on from {path}", flush=True)
    return path.resolve()


def after_restart(cfg: Any, run_dir: Path) -> None:
    """Changes ``train.resume`` for a run that its launcher has started again.

    The run continues from its own newest checkpoint; before it has one, from what ``train.resume`` names.

    Args:
        cfg: The configuration, which is changed.
        run_dir: The run's directory.
    """
    if cfg.train.resume is None or newest(run_dir / "checkpoints") is not None:
        cfg.train.resume = AUTO


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
