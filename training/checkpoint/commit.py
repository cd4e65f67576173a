"""The second phase of a save, on rank 0: from a draft with every stage in it to the newest checkpoint."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from common.errors import CheckpointError
from common.files import flush_path
from training.checkpoint.disk import remove, write_json
from training.checkpoint.manifest import FORMAT, parse_manifest, sealed
from training.checkpoint.paths import BEST, LATEST, MANIFEST, sidecar_name, step_folders

_POLL_S = 0.02


def commit(draft: Path, final: Path, manifest: dict, stages: int, keep: int, timeout_s: float) -> None:
    """All of it. ``manifest`` lacks only its files. Raises CheckpointError, OSError; older ones are untouched then."""
    files = await_stages(draft, stages, timeout_s)
    write_manifest(draft, manifest, files)
    publish(draft, final)
    point(final.parent, LATEST, final.name)
    point_best(final, manifest)
    remove_old(final.parent, keep)


def await_stages(draft: Path, stages: int, timeout_s: float) -> dict[str, dict]:
    """The files of every stage, once all have left their sidecars.

    Raises CheckpointError with a stage's error, or naming the stages from which nothing has come for ``timeout_s``
    seconds while no file of the draft has grown either.
    """
    files: dict[str, dict] = {}
    missing = set(range(stages))
    seen, deadline = None, time.monotonic() + timeout_s
    while missing:
        for stage in sorted(missing):
            content = _sidecar(draft, stage)
            if content is not None:
                if "error" in content:
                    raise CheckpointError(f"stage {stage}: {content['error']}")
                files.update(content["files"])
                missing.discard(stage)
        size = size_of(draft)
        if size != seen:
            seen, deadline = size, time.monotonic() + timeout_s
        elif time.monotonic() > deadline:
            raise CheckpointError(
                f"stage {', '.join(map(str, sorted(missing)))} of {stages} has written nothing to {draft} for "
                f"{timeout_s:g} s (parallel.timeout_s)"
            )
        if missing:
            time.sleep(_POLL_S)
    return dict(sorted(files.items()))


def write_manifest(draft: Path, manifest: dict, files: dict[str, dict]) -> None:
    """manifest.json in the place of the sidecars, and the whole draft on the disk. Raises OSError."""
    write_json(draft / MANIFEST, sealed({**manifest, "files": files}))
    for path in draft.glob("stage-*.json"):
        path.unlink()
    flush_path(draft)


def publish(draft: Path, final: Path) -> None:
    """Give the draft its name. A damaged one of that name makes room."""
    if final.exists():
        remove(final)
    os.replace(draft, final)
    flush_path(final.parent)


def point(folder: Path, name: str, target: str) -> None:
    """Have the relative link ``name`` lead to ``target``, in one step."""
    link = folder / f".{name}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    os.replace(link, folder / name)
    flush_path(folder)


def remove_old(folder: Path, keep: int) -> None:
    """All but the newest ``keep`` and what ``best`` and ``latest`` lead to."""
    linked = {os.readlink(folder / name) for name in (LATEST, BEST) if (folder / name).is_symlink()}
    for old in step_folders(folder)[: -max(keep, 1)]:
        if old.name not in linked:
            remove(old)


def amend(final: Path, manifest: dict) -> None:
    """Give a published checkpoint the progress that is known now. Raises OSError, CheckpointError."""
    known = parse_manifest(final / MANIFEST)
    if known.get("progress") != manifest["progress"]:
        write_json(final / MANIFEST, sealed({**known, "format": FORMAT, "progress": manifest["progress"]}))
    point_best(final, manifest)


def point_best(final: Path, manifest: dict) -> None:
    """Have ``best`` lead to a checkpoint whose evaluation was the best so far."""
    if manifest["progress"].get("best_step") == manifest["step"]:
        point(final.parent, BEST, final.name)


def size_of(draft: Path) -> int:
    """Bytes in the draft: grows as long as somebody writes."""
    total = 0
    for path in draft.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def _sidecar(draft: Path, stage: int) -> dict | None:
    path = draft / sidecar_name(stage)
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        failed = path.with_name(f"{path.name}.failed").exists()
        return {"error": f"it could not be written, and no room was left to say why ({draft})"} if failed else None
