"""The names in a ``checkpoints`` folder, and manifest.json, by which every bit of a checkpoint can be verified."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from common.errors import CheckpointError
from common.files import expand_home, parse_json, read_regular
from conf import TRAINED
from parallel.strategy import Strategy

MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
UNUSED = "unused-"
FORMAT = 2  # 1 had no checksum of the manifest itself

_STEP = re.compile(r"step-(\d{8,})")
_SKIPPING = ("skipped", "in_a_row", "spikes_in_a_row", "seen", "mean")


class Optimizer(Protocol):
    """What a checkpoint needs to know of an optimizer.

    Attributes:
        kind: The optimizer's class, by its full name.
    """

    kind: str

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns the optimizer's tensors for a parameter."""

    def load_state_of(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Replaces them."""


# -- names -----------------------------------------------------------------------------------------------------------


def step_name(step: int) -> str:
    """Returns the name of a step's checkpoint, such as step-00000050."""
    return f"step-{step:08d}"


def draft_name(step: int, attempt: str) -> str:
    """Returns the hidden name of a checkpoint that is being written; each attempt has its own."""
    return f".{step_name(step)}.{attempt}.tmp"


def sidecar_name(stage: int, share: int = 0) -> str:
    """Returns the name of the file that a writer of a stage writes last; the first one writes the stage's own."""
    return f"stage-{stage:02d}.json" if share == 0 else f"stage-{stage:02d}.share-{share:02d}.json"


def step_of(folder: Path) -> int:
    """Returns the step in the name of a checkpoint's folder.

    Raises:
        ValueError: The folder has another kind of name.
    """
    match = _STEP.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is not named after a step")
    return int(match[1])


def step_folders(folder: Path) -> list[Path]:
    """Returns the published checkpoints in a ``checkpoints`` folder, whole or damaged, oldest first."""
    named = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=step_of)


def drafts(folder: Path) -> list[Path]:
    """Returns the folders that killed runs have left half written or half removed."""
    return [path for path in folder.glob(".*.tmp") if path.is_dir() and not path.is_symlink()]


def checkpoint_folder(path: Path) -> Path:
    """Returns the checkpoint that a path stands for.

    That is the path itself, what it links to, or the newest checkpoint of a run directory or of its ``checkpoints``
    folder; the path itself if it is none of these. It may begin with ``~``.
    """
    path = expand_home(path)
    if (path / MANIFEST).exists():
        return path
    for folder in (path, path / "checkpoints"):
        if (folder / LATEST).is_dir():
            return folder / LATEST
        steps = step_folders(folder)
        if steps:
            return steps[-1]
    return path


# -- content ---------------------------------------------------------------------------------------------------------


def make_manifest(
    strategy: Strategy, optimizer: Optimizer, step: int, progress: dict, config: dict | None
) -> dict[str, Any]:
    """Returns a manifest without its ``files``, which the writers of the stages add.

    Args:
        strategy: What is saved.
        optimizer: Its optimizer.
        step: The step that was done last.
        progress: What the training loop needs to continue, as plain values.
        config: The run's configuration (see ``training.config.kept``).
    """
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
            "shards": strategy.mesh.shards,
            "chunks": plan.chunks,
            "precision": plan.precision,
            "stages": [list(stage.layers) for stage in plan.stages],
        },
        "tied": dict(strategy.chain.tied),
        "loss_scale": strategy.loss_scale.state_dict(),
        "progress": progress,
        "config": config,
    }


def with_checksum(manifest: dict) -> dict:
    """Returns a copy of a manifest with the checksum of all its other entries."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return {**rest, "sha256": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def parse_manifest(path: Path) -> dict[str, Any]:
    """Returns the content of a manifest.json.

    Raises:
        CheckpointError: The file cannot be read, is damaged, or is something else.
    """
    try:
        manifest = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") not in (1, FORMAT):
        raise CheckpointError(f"{path} is not the manifest of a checkpoint in format {FORMAT}")
    if manifest["format"] == FORMAT and with_checksum(manifest)["sha256"] != manifest.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
    if wrong := _wrong_entries(manifest):
        raise CheckpointError(f"{path} is damaged: {', '.join(map(str, wrong))} in it cannot be right")
    return manifest


def _wrong_entries(manifest: dict) -> list[str]:
    """Returns the keys of what those who read a manifest could not use."""
    layout, scale = manifest.get("layout"), manifest.get("loss_scale")
    checks = {
        "step": _is_count(manifest.get("step")),
        "optimizer": isinstance(manifest.get("optimizer"), str),
        "layout": isinstance(layout, dict) and _is_layout(layout),
        "loss_scale": isinstance(scale, dict) and all(map(_is_number, scale.values())),
        "progress": _is_progress(manifest.get("progress", {})),
        "config": _is_config(manifest.get("config")),
        "files": isinstance(manifest.get("files"), dict),
    }
    wrong = [key for key, right in checks.items() if not right]
    return wrong or [name for name, entry in manifest["files"].items() if not _is_file_entry(name, entry)]


def _is_config(config: Any) -> bool:
    """Returns whether it is what a run keeps of its configuration: what is trained, not where, nor what else."""
    if config is None:
        return True
    return (
        isinstance(config, dict)
        and config.keys() - {"choices", "recipe"} == {"seed", *TRAINED}
        and isinstance(config.get("choices", {}), dict)
        and isinstance(config.get("recipe", ""), str)
        and _is_count(config["seed"])
        and all(isinstance(config[name], dict) and "defaults" not in config[name] for name in TRAINED)
        and isinstance(config["model"].get("name"), str)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_layout(layout: dict) -> bool:
    """Returns whether the entries that are read are there, with the right types."""
    stages = layout.get("stages")
    return (
        isinstance(layout.get("parallel"), str)
        and all(_is_count(layout.get(key)) for key in ("dp", "pp", "chunks"))
        and isinstance(stages, list)
        and all(isinstance(stage, list) and all(isinstance(name, str) for name in stage) for stage in stages)
    )


def _is_progress(progress: Any) -> bool:
    """Returns whether it is what the training loop has saved of itself, or empty."""
    if not isinstance(progress, dict):
        return False
    losses = (progress.get(key) for key in ("first_loss", "final_loss", "best_val_loss"))
    best, skipping = progress.get("best_step"), progress.get("skipping", dict.fromkeys(_SKIPPING, 0))
    return (
        all(loss is None or _is_number(loss) for loss in losses)
        and (best is None or _is_count(best))
        and isinstance(skipping, dict)
        and all(_is_number(skipping.get(key)) for key in _SKIPPING)
    )


def _is_file_entry(name: str, entry: Any) -> bool:
    """Returns whether an entry has a plain file name (no path out of the folder), a size and a checksum."""
    return (
        re.fullmatch(r"\w[\w.-]*", name) is not None
        and isinstance(entry, dict)
        and _is_count(entry.get("bytes"))
        and isinstance(entry.get("sha256"), str)
    )
