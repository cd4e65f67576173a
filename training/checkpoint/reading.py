"""Taking a rank's share out of a checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import CheckpointError
from training.checkpoint.finding import read_manifest, suggest_alternative
from training.checkpoint.manifest import first_damaged
from training.checkpoint.paths import checkpoint_folder


def load(path: Path, strategy: Any, optimizer: Any | None = None, verified: bool = False) -> int:
    """Take this rank's share of the checkpoint ``path`` (a step folder, a link to one, the newest of a run directory);
    returns its step. All ranks call it.

    optimizer  None: weights only (evaluation)
    verified   its checksums have been compared already
    raises     CheckpointError naming what is missing, damaged or of another shape
    """
    from safetensors import SafetensorError

    path = checkpoint_folder(Path(path)).resolve()
    manifest = read_manifest(path)
    if not verified:
        _verify(path, manifest, strategy)
    if optimizer is not None and manifest["optimizer"] != optimizer.kind:
        raise CheckpointError(
            f"{path} was saved with optim {manifest['optimizer']}, this run has {optimizer.kind}: go on with the same "
            "optimizer, or start anew"
        )
    try:
        _take(Tensors(path, manifest), manifest, strategy, optimizer)
    except KeyError as error:
        raise CheckpointError(f"{path} does not fit this model: {error.args[0]}") from error
    except (ValueError, TypeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    return manifest["step"]


class Tensors(dict):
    """All tensors of a checkpoint by name, each read when it is asked for: a rank never holds another's share."""

    def __init__(self, folder: Path, manifest: dict) -> None:
        from safetensors import safe_open

        super().__init__()
        for name in manifest["files"]:
            with safe_open(folder / name, framework="pt") as file:
                self.update(dict.fromkeys(file.keys(), folder / name))

    def __getitem__(self, key: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(super().__getitem__(key), framework="pt") as file:
            return file.get_tensor(key)


def _verify(path: Path, manifest: dict, strategy: Any) -> None:
    """One rank reads everything once; the others only their share."""
    damage = None
    if strategy.mesh.rank == 0:
        damage = first_damaged(path, manifest)
        damage = damage and damage + suggest_alternative(path)
    damage = strategy.mesh.gather(damage)[0]
    if damage is not None:
        raise CheckpointError(damage)


def _take(tensors: Tensors, manifest: dict, strategy: Any, optimizer: Any | None) -> None:
    strategy.load_state_dict(tensors)
    if optimizer is None:
        return
    states: dict[str, list[str]] = {}
    for key in tensors:
        name, slash, kind = key.partition("/")
        if slash:
            states.setdefault(name, []).append(kind)
    read: Callable[[str], Tensor] = tensors.__getitem__
    for name, parameter in strategy.named_parameters():
        optimizer.load_state_of(parameter, {kind: read(f"{name}/{kind}") for kind in states.get(name, [])})
    strategy.loss_scale.load_state_dict(manifest["loss_scale"])
