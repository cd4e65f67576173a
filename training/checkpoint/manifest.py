"""manifest.json: what a checkpoint is of, and by which every bit of it can be checked."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from training.checkpoint.disk import sha256
from training.checkpoint.paths import MANIFEST, checkpoint_folder

FORMAT = 2  # 1 had no checksum of the manifest itself
_KEYS = {"step": int, "optimizer": str, "layout": dict, "loss_scale": dict, "files": dict}


def make_manifest(strategy: Any, optimizer: Any, step: int, progress: dict) -> dict:
    """Everything but ``files``, which the stages' writers will know. ``progress``: what the loop needs to go on."""
    plan = strategy.plan
    return {
        "format": FORMAT,
        "step": step,
        "seed": strategy.options.seed,
        "optimizer": optimizer.kind,
        "layout": {
            "parallel": plan.strategy,
            "dp": plan.dp,
            "pp": plan.pp,
            "chunks": plan.chunks,
            "precision": plan.precision,
            "stages": [list(stage.layers) for stage in plan.stages],
        },
        "tied": dict(strategy.chain.tied),
        "loss_scale": strategy.loss_scale.state_dict(),
        "progress": progress,
    }


def sealed(manifest: dict) -> dict:
    """With the checksum of all the rest."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return {**rest, "sha256": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def manifest_at(path: Path) -> dict:
    """See ``finding.read_manifest``; the error here says nothing of other checkpoints."""
    folder = checkpoint_folder(Path(path))
    if not (folder / MANIFEST).exists():
        raise CheckpointError(
            f"no checkpoint at {path}: expected a folder with a {MANIFEST}, such as RUN_DIR/checkpoints/latest"
        )
    manifest = parse_manifest(folder / MANIFEST)
    for name, entry in manifest["files"].items():
        size = (folder / name).stat().st_size if (folder / name).exists() else None
        if size != entry["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{folder / name} {found}, the manifest says {entry['bytes']}: the checkpoint is damaged"
            )
    return manifest


def parse_manifest(path: Path) -> dict:
    """The content of a manifest.json. Raises CheckpointError for anything but a whole one."""
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") not in (1, FORMAT):
        raise CheckpointError(f"{path} is not the manifest of a checkpoint in format {FORMAT}")
    if manifest["format"] == FORMAT and sealed(manifest)["sha256"] != manifest.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its content is not what its checksum says")
    wrong = [key for key, kind in _KEYS.items() if not isinstance(manifest.get(key), kind)]
    wrong += [name for name, entry in manifest["files"].items() if not _describes(name, entry)] if not wrong else []
    if wrong:
        raise CheckpointError(f"{path} is damaged: {', '.join(map(str, wrong))} in it cannot be right")
    return manifest


def first_damaged(folder: Path, manifest: dict) -> str | None:
    """What is wrong with the first file whose content is not what was written; None where all are whole."""
    for name, entry in manifest["files"].items():
        try:
            found = sha256(folder / name)
        except OSError as error:
            return f"{folder / name} cannot be read: {error}"
        if found != entry["sha256"]:
            told = entry["sha256"][:12]
            return f"{folder / name} is damaged: its sha256 is {found[:12]}…, the manifest says {told}…"
    return None


def _describes(name: str, entry: Any) -> bool:
    """A plain file name (nothing that leads out of the folder), a size and a checksum."""
    return (
        re.fullmatch(r"\w[\w.-]*", name) is not None
        and isinstance(entry, dict)
        and isinstance(entry.get("bytes"), int)
        and isinstance(entry.get("sha256"), str)
    )
