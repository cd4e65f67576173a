"""The names of things in a ``checkpoints`` folder."""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
UNUSED = "unused-"
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """step-00000050"""
    return f"step-{step:08d}"


def draft_name(step: int, attempt: str) -> str:
    """Hidden, and unlike that of any other attempt to save this step."""
    return f".{step_name(step)}.{attempt}.tmp"


def sidecar_name(stage: int) -> str:
    """What a stage's writer leaves last."""
    return f"stage-{stage:02d}.json"


def step_of(folder: Path) -> int:
    """The step that a folder's name states. Raises ValueError for other names."""
    match = _STEP.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is not named after a step")
    return int(match[1])


def step_folders(folder: Path) -> list[Path]:
    """Published checkpoints, whole or not, oldest first."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def drafts(folder: Path) -> list[Path]:
    """What runs that were killed have left half written, half removed, or linked to nowhere yet."""
    return [path for path in folder.glob(".*.tmp") if path.is_dir() and not path.is_symlink()]


def checkpoint_folder(path: Path) -> Path:
    """The step folder that ``path`` stands for: itself, what it links to, or the newest in a run directory or its
    ``checkpoints``. ``path`` itself where it is none of these."""
    path = Path(path)
    if (path / MANIFEST).exists():
        return path
    for folder in (path, path / "checkpoints"):
        if (folder / LATEST).is_dir():
            return folder / LATEST
        steps = step_folders(folder)
        if steps:
            return steps[-1]
    return path
