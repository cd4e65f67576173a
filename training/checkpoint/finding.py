"""Which checkpoint to go on from, and what to do with those that are not it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from common.errors import CheckpointError
from training.checkpoint.commit import point
from training.checkpoint.disk import remove
from training.checkpoint.manifest import first_damaged, manifest_at
from training.checkpoint.paths import BEST, LATEST, UNUSED, checkpoint_folder, step_folders, step_name, step_of


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint: of a step folder, a link to one, or the newest of a run directory.

    Raises CheckpointError where there is none, where it is damaged, or where files of it are missing or have another
    size; it says which other one is whole.
    """
    try:
        return manifest_at(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{suggest_alternative(checkpoint_folder(path))}") from error


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a ``checkpoints`` folder whose files are all there, by their sizes; None without any."""
    for path in reversed(step_folders(folder)):
        try:
            manifest_at(path)
            return path
        except CheckpointError:
            continue
    return None


def newest_whole(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint in a ``checkpoints`` folder that is what was written, bit for bit; None without any.

    ``warn`` gets a line for each newer one that is damaged.
    """
    for path in reversed(step_folders(folder)):
        problem = problem_of(path)
        if problem is None:
            return path
        warn(f"damaged checkpoint {path.name}: {problem}")
    return None


def locate(path: Path) -> Path:
    """The step folder that ``path`` stands for, verified bit for bit.

    Raises CheckpointError that says what is wrong with it and which other one is whole.
    """
    folder = checkpoint_folder(path)
    problem = problem_of(folder, path)
    if problem is not None:
        raise CheckpointError(f"{problem}{suggest_alternative(folder)}")
    return folder.resolve()


def problem_of(folder: Path, called: Path | None = None) -> str | None:
    """Why a checkpoint cannot be used; None for a whole one. ``called``: the path that the user gave."""
    try:
        manifest = manifest_at(folder if called is None else called)
    except CheckpointError as error:
        return str(error)
    return first_damaged(folder, manifest)


def suggest_alternative(path: Path) -> str:
    """Which other checkpoint beside a damaged one is whole, as the end of a sentence; empty where there is no other."""
    folder = path.resolve()
    others = [other for other in reversed(step_folders(folder.parent)) if other != folder]
    if not others:
        return ""
    whole = next((other for other in others if problem_of(other) is None), None)
    return (
        f"; no other one in {folder.parent} is whole" if whole is None else f"; the newest whole one there is {whole}"
    )


def set_current(folder: Path, path: Path | None, best_step: int | None, say: Callable[[str], None]) -> None:
    """Make ``path`` the newest checkpoint of the run directory's ``folder``, as this run goes on from it (None: from
    the beginning). Newer ones, damaged or left behind on purpose, keep their files under another name."""
    step = 0 if path is None else step_of(path)
    if path is not None:
        point(folder, LATEST, path.name)
    if best_step is not None and (folder / step_name(best_step)).is_dir():
        point(folder, BEST, step_name(best_step))
    for newer in step_folders(folder):
        if step_of(newer) > step:
            aside = newer.with_name(UNUSED + newer.name)
            if aside.exists():
                remove(aside)
            os.replace(newer, aside)
            say(f"{newer} is kept as {aside.name}: this run goes on from step {step}")
    for name in (LATEST, BEST):
        if (folder / name).is_symlink() and not (folder / name).exists():
            (folder / name).unlink()
