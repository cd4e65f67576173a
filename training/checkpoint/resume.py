"""Resuming a run: which checkpoint it continues from, and what that checkpoint knows of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from training.checkpoint.files import (
    BEST,
    LATEST,
    UNUSED,
    Checkpoint,
    remove,
    step_folders,
    step_name,
    step_of,
    update_link,
)
from training.checkpoint.load import load
from training.checkpoint.save import Checkpointer

AUTO = "auto"


def resume(wanted: str, checkpoints: Checkpointer) -> Checkpoint | None:
    """Load the checkpoint that ``train.resume`` names. All ranks call it; rank 0 chooses and prints.

    Args:
        wanted: A path; "auto" for the newest checkpoint of this run directory that is whole, bit for bit (a warning
            names the damaged ones).
        checkpoints: The checkpoints of this run directory, with the model and the optimizer to load into.

    Returns:
        The checkpoint that was loaded; None for a run that starts from the beginning.

    Raises:
        CheckpointError: On every rank: the checkpoint that was named is damaged, or does not fit.
    """
    strategy, path, problem = checkpoints.strategy, None, None
    if strategy.mesh.rank == 0:
        try:
            path = _choose(wanted, checkpoints.folder)
        except CheckpointError as error:
            problem = str(error)
    problem, path = strategy.mesh.gather((problem, path))[0]
    if problem is not None:
        raise CheckpointError(problem)
    loaded = None
    if path is not None:
        loaded = load(Path(path), strategy, checkpoints.optimizer, verify=False)
        checkpoints.resumed_from(loaded)
    if loaded is None or loaded.folder.parent == checkpoints.folder.resolve():
        if strategy.mesh.rank == 0 and checkpoints.folder.is_dir():
            try:
                _make_newest(checkpoints.folder, loaded, quiet=wanted == AUTO)
            except OSError as error:
                _warn(f"{checkpoints.folder} cannot be changed: {error}")
    return loaded


def _choose(wanted: str, folder: Path) -> str | None:
    if wanted == AUTO:
        chosen = Checkpoint.newest(folder, True, lambda why: _warn(f"{why}; it is not used, and kept as {UNUSED}…"))
    else:
        chosen = Checkpoint.find(Path(wanted), verify=True)
    if chosen is None:
        print(f"train.resume=auto: no checkpoint in {folder} to go on from; this run starts at step 1", flush=True)
        return None
    print(f"going on from {chosen.folder}", flush=True)
    return str(chosen.folder)


def _make_newest(folder: Path, loaded: Checkpoint | None, quiet: bool) -> None:
    """Make a checkpoint the newest one of its run. Newer ones, damaged or skipped on purpose, are renamed."""
    step = 0
    if loaded is not None:
        step, best = loaded.step, loaded.progress.get("best_step")
        update_link(folder, LATEST, loaded.folder.name)
        if best is not None and (folder / step_name(best)).is_dir():
            update_link(folder, BEST, step_name(best))
    for newer in step_folders(folder):
        if step_of(newer) > step:
            renamed = newer.with_name(UNUSED + newer.name)
            if renamed.exists():
                remove(renamed)
            os.replace(newer, renamed)
            if not quiet:  # the damaged ones have been named already
                _warn(f"{newer} is kept as {renamed.name}: this run goes on from step {step}")
    for name in (LATEST, BEST):
        if (folder / name).is_symlink() and not (folder / name).exists():
            (folder / name).unlink()


def after_restart(cfg: Any, run_dir: Path) -> None:
    """Change ``train.resume`` for a run that its launcher has started again.

    The run continues from its own newest checkpoint; before it has one, from what ``train.resume`` names.
    """
    if cfg.train.resume is None or Checkpoint.newest(run_dir / "checkpoints") is not None:
        cfg.train.resume = AUTO


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
