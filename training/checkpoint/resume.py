"""Going on with a run: which checkpoint, what it knows, and what is said about it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from parallel.strategy import Strategy
from training import checkpoint
from training.checkpoint import Checkpoints
from training.optimizer import Optimizer

AUTO = "auto"


@dataclass
class Resumed:
    """``step``: the last one that is done, 0 for none; ``progress``: see ``Loop.progress``; ``path``: of the
    checkpoint, None for a run that starts anew."""

    step: int = 0
    progress: dict = field(default_factory=dict)
    path: Path | None = None


def resume(wanted: str | None, checkpoints: Checkpoints, strategy: Strategy, optimizer: Optimizer) -> Resumed:
    """Load what ``train.resume`` names. All ranks call it; rank 0 looks and says.

    auto    the newest checkpoint of this run directory that is whole, bit for bit; a damaged one gets a line
    raises  CheckpointError, on every rank, where a path that was named is damaged
    """
    if wanted is None:
        return Resumed()
    found = problem = None
    if strategy.mesh.rank == 0:
        try:
            found = _choose(wanted, checkpoints.folder)
        except CheckpointError as error:
            problem = str(error)
    problem, found = strategy.mesh.gather((problem, found))[0]
    if problem is not None:
        raise CheckpointError(problem)
    own = found is None or found.parent == checkpoints.folder.resolve()
    if found is None:
        resumed = Resumed()
    else:
        step = checkpoint.load(found, strategy, optimizer, verified=True)
        resumed = Resumed(step, checkpoint.read_manifest(found).get("progress", {}), found)
    if own:
        if strategy.mesh.rank == 0 and checkpoints.folder.is_dir():
            say = _warn if wanted != AUTO else lambda text: None  # the damaged ones have had their line
            try:
                checkpoint.set_current(checkpoints.folder, found, resumed.progress.get("best_step"), say)
            except OSError as error:
                _warn(f"{checkpoints.folder} cannot be changed: {error}")
        if found is not None:
            checkpoints.resumed_from(found)
    return resumed


def _choose(wanted: str, folder: Path) -> Path | None:
    if wanted != AUTO:
        found = checkpoint.locate(Path(wanted))
    else:
        found = checkpoint.newest_whole(folder, lambda why: _warn(f"{why}; it is not used, and kept as unused-…"))
    if found is None:
        print(f"train.resume=auto: no checkpoint in {folder} to go on from; this run starts at step 1", flush=True)
    else:
        print(f"going on from {found}", flush=True)
    return found.resolve() if found is not None else None


def after_restart(cfg: Any, run_dir: Path) -> None:
    """Have a run that was started a second time by its launcher go on from its own newest checkpoint; without any,
    from what ``train.resume`` names."""
    if cfg.train.resume is None or checkpoint.newest(run_dir / "checkpoints") is not None:
        cfg.train.resume = AUTO


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
