"""The second part of a save, on rank 0: from a draft with the files of every stage to the newest checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from common.errors import CheckpointError
from common.files import flush_path, write_atomically
from training.checkpoint.manifest import (
    BEST,
    FORMAT,
    LATEST,
    MANIFEST,
    UNUSED,
    parse_manifest,
    sidecar_name,
    step_folders,
    step_name,
    step_of,
    with_checksum,
)

_POLL_S = 0.02


def commit(draft: Path, final: Path, manifest: dict, stages: int, keep: int, timeout_s: float) -> None:
    """Completes and publishes a checkpoint.

    Args:
        draft: The folder in which the stages write.
        final: The checkpoint's name.
        manifest: The manifest without its ``files``.
        stages: The number of stages.
        keep: How many of the newest checkpoints are kept.
        timeout_s: The longest wait, in seconds, while nothing is written to the draft.

    Raises:
        CheckpointError: A stage has failed, or has written nothing for too long.
        OSError: The disk is full or not writable. Older checkpoints are untouched in both cases.
    """
    files = await_stages(draft, stages, timeout_s)
    write_manifest(draft, manifest, files)
    publish(draft, final)
    update_link(final.parent, LATEST, final.name)
    update_best(final, manifest)
    remove_old(final.parent, keep)


def await_stages(draft: Path, stages: int, timeout_s: float) -> dict[str, dict]:
    """Waits until every stage has written its sidecar; returns the size and the sha256 of all files by their names.

    Raises as ``await_sidecars`` does.
    """
    names = {sidecar_name(stage): f"stage {stage}" for stage in range(stages)}
    files = {}
    for content in await_sidecars(draft, names, timeout_s).values():
        files.update(content["files"])
    return dict(sorted(files.items()))


def await_sidecars(draft: Path, names: dict[str, str], timeout_s: float) -> dict[str, dict]:
    """Waits until the writers of some sidecars are done.

    Args:
        draft: The folder.
        names: What to call the writer of each sidecar, by the sidecar's name.
        timeout_s: The longest wait, in seconds, while nothing is written to the draft.

    Returns:
        The content of each sidecar, by its name.

    Raises:
        CheckpointError: A writer has failed; or some have written no sidecar yet, and no file of the draft has changed
            for ``timeout_s`` seconds.
    """
    contents: dict[str, dict] = {}
    last_seen, deadline = None, time.monotonic() + timeout_s
    while len(contents) < len(names):
        for name in names.keys() - contents.keys():
            content = _read_sidecar(draft / name)
            if content is not None:
                if "error" in content:
                    raise CheckpointError(f"{names[name]}: {content['error']}")
                contents[name] = content
        seen = activity_in(draft)
        if seen != last_seen:
            last_seen, deadline = seen, time.monotonic() + timeout_s
        elif time.monotonic() > deadline:
            silent = ", ".join(who for name, who in names.items() if name not in contents)
            raise CheckpointError(
                f"{silent} of {len(names)} has written nothing to {draft} for {timeout_s:g} s (parallel.timeout_s)"
            )
        if len(contents) < len(names):
            time.sleep(_POLL_S)
    return contents


def write_manifest(draft: Path, manifest: dict, files: dict[str, dict]) -> None:
    """Replaces the sidecars by manifest.json and flushes the draft to the disk. Raises OSError."""
    _write(draft / MANIFEST, {**manifest, "files": files})
    for path in draft.glob("stage-*.json"):
        path.unlink()
    flush_path(draft)


def publish(draft: Path, final: Path) -> None:
    """Gives the draft its name. A damaged checkpoint of that name is removed first."""
    if final.exists():
        remove(final)
    os.replace(draft, final)
    flush_path(final.parent)


def update_link(folder: Path, name: str, target: str) -> None:
    """Has the relative link ``name`` lead to ``target``, in one step."""
    link = folder / f".{name}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    os.replace(link, folder / name)
    flush_path(folder)


def update_best(final: Path, manifest: dict) -> None:
    """Has ``best`` lead to a checkpoint whose evaluation was the best so far."""
    if manifest["progress"].get("best_step") == manifest["step"]:
        update_link(final.parent, BEST, final.name)


def remove_old(folder: Path, keep: int) -> None:
    """Removes all checkpoints but the newest ``keep`` and those that ``best`` and ``latest`` lead to."""
    linked = {os.readlink(folder / name) for name in (LATEST, BEST) if (folder / name).is_symlink()}
    for old in step_folders(folder)[: -max(keep, 1)]:
        if old.name not in linked:
            remove(old)


def remove(folder: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that half of it is never taken for one."""
    hidden = folder.with_name(f".{folder.name}.removed.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def amend(final: Path, manifest: dict) -> None:
    """Replaces the progress in the manifest of a published checkpoint. Raises OSError, CheckpointError."""
    known = parse_manifest(final / MANIFEST)
    if known.get("progress") != manifest["progress"]:
        _write(final / MANIFEST, {**known, "format": FORMAT, "progress": manifest["progress"]})
    update_best(final, manifest)


def set_current(folder: Path, path: Path | None, best_step: int | None, say: Callable[[str], None]) -> None:
    """Makes a checkpoint the newest one of its run, which is resumed from it.

    Newer checkpoints, damaged or skipped on purpose, are renamed.

    Args:
        folder: The run's ``checkpoints`` folder.
        path: The checkpoint; None for a run that starts from the beginning.
        best_step: The step with the lowest validation loss up to then.
        say: Takes a line about each checkpoint that is renamed.
    """
    step = 0 if path is None else step_of(path)
    if path is not None:
        update_link(folder, LATEST, path.name)
    if best_step is not None and (folder / step_name(best_step)).is_dir():
        update_link(folder, BEST, step_name(best_step))
    for newer in step_folders(folder):
        if step_of(newer) > step:
            renamed = newer.with_name(UNUSED + newer.name)
            if renamed.exists():
                remove(renamed)
            os.replace(newer, renamed)
            say(f"{newer} is kept as {renamed.name}: this run goes on from step {step}")
    for name in (LATEST, BEST):
        if (folder / name).is_symlink() and not (folder / name).exists():
            (folder / name).unlink()


def activity_in(draft: Path) -> int:
    """Returns a number that changes as long as some rank writes to the draft, also into the middle of a file."""
    total = 0
    for path in draft.glob("*"):
        try:
            status = path.stat()
        except OSError:
            continue
        total += status.st_size + status.st_mtime_ns
    return total


def _write(path: Path, manifest: dict) -> None:
    write_atomically(path, json.dumps(with_checksum(manifest), indent=1))


def _read_sidecar(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        if not path.with_name(f"{path.name}.failed").exists():
            return None
        return {"error": f"it could not be written, and no room was left to say why ({path.parent})"}
