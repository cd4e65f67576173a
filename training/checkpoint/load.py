"""Choosing a checkpoint that is whole, and reading a rank's tensors from it, whatever layout has saved it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import CheckpointError
from parallel.strategy import Strategy
from training.checkpoint.manifest import Optimizer, checkpoint_folder, step_folders
from training.checkpoint.tensor_file import StoredTensor
from training.checkpoint.verify import first_damaged, manifest_at


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint.

    Args:
        path: A checkpoint, a link to one, or a run directory, whose newest checkpoint is meant.

    Raises:
        CheckpointError: There is no checkpoint, its manifest is damaged, or files are missing or have another size.
            The message names another checkpoint that is whole.
    """
    try:
        return manifest_at(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{suggest_alternative(checkpoint_folder(path))}") from error


def newest(folder: Path) -> Path | None:
    """Returns the newest checkpoint in a ``checkpoints`` folder whose files exist with the right sizes."""
    for path in reversed(step_folders(folder)):
        try:
            manifest_at(path)
            return path
        except CheckpointError:
            continue
    return None


def newest_whole(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """Returns the newest checkpoint in a ``checkpoints`` folder that is whole, bit for bit.

    Args:
        folder: The folder.
        warn: Takes a line about each newer checkpoint that is damaged.
    """
    for path in reversed(step_folders(folder)):
        problem = problem_of(path)
        if problem is None:
            return path
        warn(f"damaged checkpoint {path.name}: {problem}")
    return None


def locate(path: Path) -> Path:
    """Returns the checkpoint that ``path`` stands for, verified bit for bit.

    Raises:
        CheckpointError: It is damaged; the message names another one that is whole.
    """
    folder = checkpoint_folder(path)
    problem = problem_of(folder, path)
    if problem is not None:
        raise CheckpointError(f"{problem}{suggest_alternative(folder)}")
    return folder.resolve()


def problem_of(folder: Path, given: Path | None = None) -> str | None:
    """Returns why a checkpoint cannot be used, or None for a whole one.

    Args:
        folder: The checkpoint.
        given: The path that the user gave, for the message.
    """
    try:
        manifest = manifest_at(folder if given is None else given)
    except CheckpointError as error:
        return str(error)
    return first_damaged(folder, manifest)


def suggest_alternative(path: Path) -> str:
    """Returns the end of an error message: which other checkpoint in the same folder is whole. Empty without others."""
    folder = path.resolve()
    others = [other for other in reversed(step_folders(folder.parent)) if other != folder]
    if not others:
        return ""
    whole = next((other for other in others if problem_of(other) is None), None)
    if whole is None:
        return f"; no other one in {folder.parent} is whole"
    return f"; the newest whole one there is {whole}"


def load(path: Path, strategy: Strategy, optimizer: Optimizer | None = None, verified: bool = False) -> int:
    """Loads a checkpoint. All ranks call it; each reads its own tensors only.

    Args:
        path: A checkpoint, a link to one, or a run directory, whose newest checkpoint is meant.
        strategy: The model to load into.
        optimizer: Its optimizer; None to load weights only.
        verified: Whether the checksums have been compared already.

    Returns:
        The checkpoint's step.

    Raises:
        CheckpointError: Something is missing, damaged or of another shape; the message names it.
    """
    from safetensors import SafetensorError

    path = checkpoint_folder(Path(path)).resolve()
    manifest = read_manifest(path)
    if not verified:
        _verify(path, manifest, strategy)
    # An older checkpoint names the optimizer of the matrices only.
    if optimizer is not None and manifest["optimizer"] not in (optimizer.kind, optimizer.kind.partition(" for ")[0]):
        raise CheckpointError(
            f"{path} was saved with optim {manifest['optimizer']}, this run has {optimizer.kind}: go on with the same "
            "optimizer, or start anew"
        )
    try:
        tensors = Tensors(path, manifest)
        strategy.load_state_dict(tensors)
        if optimizer is not None:
            _load_optimizer(tensors, strategy, optimizer)
            strategy.loss_scale.load_state_dict(manifest["loss_scale"])
    except KeyError as error:
        raise CheckpointError(f"{path} does not fit this model: {error.args[0]}") from error
    except (ValueError, TypeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    return manifest["step"]


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a whole model's parameters and buffers, a tied parameter under its canonical name.

    Args:
        path: A checkpoint, a link to one, or a run directory, whose newest checkpoint is meant.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    from safetensors.torch import load_file

    folder = locate(Path(path))
    files = [name for name in read_manifest(folder)["files"] if name.startswith("model-")]
    return {key: tensor for name in files for key, tensor in load_file(folder / name).items()}


class Tensors(dict):
    """The tensors of a checkpoint by name. Rows are read when they are asked for: a rank never holds another's."""

    def __init__(self, folder: Path, manifest: dict) -> None:
        """Reads the names of all tensors."""
        from safetensors import safe_open

        super().__init__()
        for name in manifest["files"]:
            with safe_open(folder / name, framework="pt") as file:
                self.update(dict.fromkeys(file.keys(), folder / name))

    def __getitem__(self, key: str) -> StoredTensor:
        return StoredTensor(super().__getitem__(key), key)


def _verify(path: Path, manifest: dict, strategy: Strategy) -> None:
    """Has rank 0 read every file once; other ranks read only their own tensors, later."""
    damage = None
    if strategy.mesh.rank == 0:
        damage = first_damaged(path, manifest)
        damage = damage and damage + suggest_alternative(path)
    damage = strategy.mesh.gather(damage)[0]
    if damage is not None:
        raise CheckpointError(damage)


def _load_optimizer(tensors: Tensors, strategy: Strategy, optimizer: Optimizer) -> None:
    kinds: dict[str, list[str]] = {}
    for key in tensors:
        name, slash, kind = key.partition("/")
        if slash:
            kinds.setdefault(name, []).append(kind)
    for name, parameter in strategy.named_parameters():
        state = {kind: tensors[f"{name}/{kind}"] for kind in kinds.get(name, [])}
        for kind, value in state.items():  # of the weights' dtype, as they are now; not counters and plain numbers
            if kind != "step" and "#" not in kind and name in tensors and value.dtype == tensors[name].dtype:
                value.dtype = parameter.dtype
        optimizer.load_state_of(parameter, state)
