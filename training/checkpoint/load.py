"""Reading a rank's tensors from a checkpoint, whatever layout has saved it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from common.errors import CheckpointError
from parallel.strategy import Strategy
from training.checkpoint.files import Checkpoint


class Optimizer(Protocol):
    """What a checkpoint needs to know of an optimizer; ``kind`` is the full name of its class."""

    kind: str

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the optimizer's tensors for a parameter."""

    def load_state_of(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Replace them."""


def load(path: Path, strategy: Strategy, optimizer: Optimizer | None = None, verify: bool = True) -> Checkpoint:
    """Load a checkpoint. All ranks call it; each reads its own tensors only.

    Args:
        path: See ``Checkpoint.find``.
        strategy: The model to load into.
        optimizer: Its optimizer; None to load weights only.
        verify: Whether rank 0 compares all checksums first.

    Raises:
        CheckpointError: On every rank: something is missing, damaged or of another shape; the message names it.
    """
    from safetensors import SafetensorError

    checkpoint = problem = None
    try:
        checkpoint = Checkpoint.find(path, verify and strategy.mesh.rank == 0)
    except CheckpointError as error:
        problem = str(error)
    problems = strategy.mesh.gather(problem)
    if any(problems):
        raise CheckpointError(next(filter(None, problems)))
    # An older checkpoint names the optimizer of the matrices only.
    if optimizer is not None and checkpoint.optimizer not in (optimizer.kind, optimizer.kind.partition(" for ")[0]):
        raise CheckpointError(
            f"{checkpoint.folder} was saved with optim {checkpoint.optimizer}, this run has {optimizer.kind}: go on "
            "with the same optimizer, or start anew"
        )
    try:
        tensors = Tensors(checkpoint)
        strategy.load_state_dict(tensors)
        if optimizer is not None:
            _load_optimizer(tensors, strategy, optimizer)
            scale, state = strategy.loss_scale, checkpoint.loss_scale
            scale.scale, scale.good_steps = float(state["scale"]), int(state["good_steps"])
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.folder} does not fit this model: {error.args[0]}") from error
    except (ValueError, TypeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint.folder} cannot be loaded: {error}") from error
    return checkpoint


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a checkpoint's parameters and buffers, whole; a tied parameter is there once, by its canonical name."""
    tensors = Tensors(Checkpoint.find(path, verify=True))
    return {name: tensors[name][...] for name in tensors if "/" not in name}


class Tensors(dict):
    """The tensors of a checkpoint by name. Rows are read when they are asked for: a rank never holds another's."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read the names of all tensors. Raises OSError and SafetensorError."""
        from safetensors import safe_open

        super().__init__()
        for path in (checkpoint.folder / name for name in checkpoint.files):
            with safe_open(path, framework="pt") as file:
                self.update(dict.fromkeys(file.keys(), path))

    def __getitem__(self, key: str) -> StoredTensor:
        return StoredTensor(super().__getitem__(key), key)


class StoredTensor:
    """A tensor in a file: its shape, and its rows, which are read when they are asked for.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: The dtype of what is read: the file's, until another is set.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Open the file, whose header is read. Raises OSError and SafetensorError."""
        from safetensors import safe_open

        self._file, self._name = safe_open(path, framework="pt"), name
        self._slice = self._file.get_slice(name)
        self.shape = torch.Size(self._slice.get_shape())
        self.dtype = (self._slice[:0] if self.shape else self._file.get_tensor(name)).dtype

    def __getitem__(self, rows: slice) -> Tensor:
        return (self._slice[rows] if isinstance(rows, slice) else self._file.get_tensor(self._name)).to(self.dtype)


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
