"""Whether a run that met with faults has become what the undisturbed one is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from faults.runs import Ended


def differences(disturbed: Ended, undisturbed: Ended) -> list[str]:
    """In sentences; empty where the final checkpoints and the losses are equal bit for bit and all files are whole."""
    found = [f"left behind: {command}" for command in disturbed.left]
    if disturbed.run.code != 0:
        last = disturbed.run.stderr.strip().splitlines()[-1:] or ["no message"]
        return [*found, f"exit code {disturbed.run.code}: {last[0]}"]
    found += corrupt(disturbed.run.folder)
    if not final_tensors(disturbed.run.folder):
        found.append("there is no final checkpoint")
    ours, theirs = (final_tensors(ended.run.folder) for ended in (disturbed, undisturbed))
    names = sorted(ours.keys() | theirs.keys())
    found += [f"final {name} is another" for name in names if ours.get(name) != theirs.get(name)]
    found += _metrics(disturbed, undisturbed)
    return found


def corrupt(run_dir: Path) -> list[str]:
    """What is wrong with the checkpoints of a run directory: damaged ones, half ones under a final name."""
    found = []
    for folder in sorted((run_dir / "checkpoints").glob("step-*")):
        try:
            files = json.loads((folder / "manifest.json").read_text())["files"]
            bad = [name for name, entry in files.items() if _sha256(folder / name) != entry["sha256"]]
            found += [f"{folder / name} is damaged" for name in bad]
        except (OSError, ValueError, KeyError) as error:
            found.append(f"{folder}: {error!r}")
    latest = run_dir / "checkpoints" / "latest"
    if latest.is_symlink() and not (latest / "manifest.json").exists():
        found.append("checkpoints/latest leads nowhere")
    return found


def final_tensors(run_dir: Path) -> dict[str, str]:
    """The checksum of each file of the newest checkpoint: weights and the optimizer's state."""
    folder = run_dir / "checkpoints" / "latest"
    return {path.name: _sha256(path) for path in folder.glob("*.safetensors")}


def _metrics(disturbed: Ended, undisturbed: Ended) -> list[str]:
    found = []
    steps = [line["step"] for line in disturbed.run.steps]
    if steps != list(range(1, len(undisturbed.run.steps) + 1)):
        found.append(f"metrics.jsonl has steps {steps}")
    for name in ("losses", "val_losses"):
        if getattr(disturbed.run, name) != getattr(undisturbed.run, name):
            found.append(f"{name} differ")
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
