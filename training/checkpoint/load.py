"""Loads a rank's tensors from a checkpoint of any layout, and chooses the checkpoint that a run resumes from."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from common.errors import CheckpointError
from conf.instantiate import with_values
from conf.schema import Root
from models.chain import Chain
from models.sequential import names_of_module
from models.step import set_step
from parallel.mesh import Mesh
from parallel.pieces import Box
from parallel.strategy import Strategy
from training.checkpoint.files import (
    BEST,
    LATEST,
    UNUSED,
    Checkpoint,
    set_aside,
    step_folders,
    step_name,
    step_of,
    update_link,
)
from training.optimizer import Optimizer
from training.optimizer.average import TRAINED
from training.optimizer.groups import frozen_until

AUTO = "auto"
_SHOWN = 4  # names or keys that differ
_ASK_S = 1.0
T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]


def load(path: Path, strategy: Strategy) -> Checkpoint:
    """Load weights. All ranks call this; rank 0 first compares all checksums. Each rank reads only its tensors.

    Args:
        path: See ``Checkpoint.find``.
        strategy: The model to load into.

    Raises:
        CheckpointError: On every rank: a file or tensor is missing, damaged or of another shape, or another rank has
            another checkpoint; the message names it.
    """
    checkpoint = _together(strategy.mesh, lambda: Checkpoint.find(path, verify=strategy.mesh.rank == 0))
    return _load(checkpoint, strategy)


def _load(checkpoint: Checkpoint, strategy: Strategy, optimizer: Optimizer | None = None) -> Checkpoint:
    """Load the checkpoint that each rank has found, after checking that it is the same one on all ranks.

    Without an ``optimizer``, only weights are loaded.
    """
    from safetensors import SafetensorError

    files = strategy.mesh.gather(checkpoint.files)
    if others := [str(rank) for rank, theirs in enumerate(files) if theirs != files[0]]:
        raise CheckpointError(
            f"{checkpoint.folder} is another checkpoint on rank{'s' * (len(others) > 1)} {', '.join(others)} than on "
            "rank 0: give every machine the same one"
        )
    if optimizer is not None and checkpoint.optimizer != optimizer.kind:
        raise CheckpointError(
            f"{checkpoint.folder} was saved with optim {checkpoint.optimizer}, this run has {optimizer.kind}: continue "
            "with the same optimizer, or start a new run; mode=export writes these weights for its model.init_from="
        )
    try:
        tensors = stored_tensors(checkpoint)
        _compare(checkpoint, tensors, strategy.chain, trains=optimizer is not None)
        strategy.load_state_dict(tensors, lambda name: name not in strategy.chain.unsaved)
        set_step(checkpoint.step)
        if optimizer is not None:
            _load_optimizer(tensors, strategy, optimizer)
            optimizer.average.load(checkpoint.average, tensors)
            before, now = (checkpoint.average or {}).get("kind"), optimizer.average.kind
            if before != now and strategy.mesh.rank == 0:
                left_out = f"the checkpoint's average of weights is left out; callbacks=[{before}] would continue it"
                _warn(f"{now} begins a new average: the checkpoint has {before or 'none'}" if now else left_out)
            strategy.loss_scale.load_state_dict(checkpoint.loss_scale)
    except (ValueError, TypeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint.folder} cannot be loaded: {error}") from error
    return checkpoint


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read all parameters and buffers of a checkpoint under the given module's names, tied parameters included."""
    checkpoint = Checkpoint.find(path, verify=True)
    tensors = stored_tensors(checkpoint)
    weights = {name: tensors[name][...] for name in tensors if "/" not in name}
    return names_of_module(weights, checkpoint.tied, [name for stage in checkpoint.layout["stages"] for name in stage])


def stored_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name. Raises OSError and SafetensorError.

    Boxes are read on demand: a rank never holds the tensors of another.
    """
    from safetensors import safe_open

    # Each file is opened once, because each mapping of a file has page faults of its own.
    files = [safe_open(checkpoint.folder / name, framework="pt") for name in checkpoint.files]
    return {name: StoredTensor(file, name) for file in files for name in file.keys()}


def names_in(path: Path) -> frozenset[str]:
    """Return the names of a checkpoint's tensors; none if it cannot be read, which is an error when it is loaded."""
    from safetensors import SafetensorError

    try:
        return frozenset(stored_tensors(Checkpoint.find(path)))
    except (CheckpointError, OSError, SafetensorError):
        return frozenset()


class StoredTensor:
    """A tensor in a file. Boxes of it are read on demand.

    Attributes:
        shape: The shape of the whole tensor.
    """

    def __init__(self, file: Any, name: str) -> None:
        """Read the tensor's entry in the header of ``file``, a ``safetensors.safe_open``."""
        self._file, self._name = file, name
        self._slice = file.get_slice(name)
        self.shape = torch.Size(self._slice.get_shape())

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype to which boxes are converted; initially the dtype in the file. It may be set."""
        return (self._slice[:0] if self.shape else self._file.get_tensor(self._name)).dtype

    def __getitem__(self, box: Box) -> Tensor:
        return (self._file.get_tensor(self._name) if box is ... else self._slice[box]).to(self.dtype)


def _load_optimizer(tensors: Mapping[str, StoredTensor], strategy: Strategy, optimizer: Optimizer) -> None:
    kinds: dict[str, list[str]] = {}
    for key in tensors:
        name, slash, kind = key.partition("/")
        if slash and not key.endswith(TRAINED):
            kinds.setdefault(name, []).append(kind)
    for name, parameter in strategy.named_parameters():
        state = {kind: tensors[f"{name}/{kind}"] for kind in kinds.get(name, [])}
        # State in the stored weights' dtype takes the present weights' dtype; counters and plain numbers keep theirs.
        for kind, value in state.items():
            if kind != "step" and "#" not in kind and name in tensors and value.dtype == tensors[name].dtype:
                value.dtype = parameter.dtype
        optimizer.load_state_of(parameter, state)


def check_fits(path: Path, chain: Chain, cfg: Root) -> None:
    """Check that a checkpoint holds the model ``chain``, built from ``cfg``, and no other tensors.

    Only the names and shapes of tensors are compared; no tensor is read.

    Raises:
        CheckpointError: Tensors are missing, left over or of another shape. The message names them, and the keys that
            differ from the checkpoint's.
    """
    from safetensors import SafetensorError

    checkpoint = Checkpoint.find(path)
    with suppress(OSError, SafetensorError):  # damaged: loading compares the checksums and names the file
        _compare(checkpoint, stored_tensors(checkpoint), chain, cfg.mode == "train", cfg)


def _compare(
    checkpoint: Checkpoint, stored: Mapping[str, StoredTensor], chain: Chain, trains: bool, cfg: Root | None = None
) -> None:
    """Compare a checkpoint's tensors with a model's and, if the run ``trains``, also with its optimizer's."""
    skeleton = chain.skeleton()
    names = [(chain.canonical(name), tensor) for name, tensor in skeleton.state_dict().items()]
    wanted = {name: tuple(tensor.shape) for name, tensor in names if name not in chain.unsaved}
    problems = differences({name: tuple(stored[name].shape) for name in stored if "/" not in name}, wanted)
    config = checkpoint.config or {}
    optim, unfreeze = config.get("optim", {}), config.get("train", {}).get("unfreeze")
    states = {name.partition("/")[0] for name in stored if "/" in name and not name.endswith(TRAINED)}
    if trains and states and not problems:
        trained = {chain.canonical(name) for name, p in skeleton.named_parameters() if p.requires_grad}
        # An optimizer that is not torch's may keep the state of all parameters under a single parameter.
        every = str(optim.get("_target_")).startswith("torch.optim.") and not optim.get("others")
        problems = [f"it trained {name}, which is frozen now" for name in sorted(states - trained)]
        late = {name for name, until in frozen_until(unfreeze, chain).items() if checkpoint.step <= until}
        lost = sorted(trained - states - late) if every else []
        problems += [f"{name} was frozen in it, and is trained now" for name in lost]
    if problems:
        reasons = _differences(checkpoint.config, cfg) if cfg is not None else ""
        raise CheckpointError(f"{checkpoint.folder} does not fit this model: {problems[0]}{reasons}")


def differences(stored: Shapes, wanted: Shapes, missing: str = "is not in it", expected: str = "expected") -> list[str]:
    """Compare the shapes of stored tensors and of a model's tensors in both directions, and return the problems."""
    problems = [f"{name} {missing}" for name in wanted if name not in stored]
    both = [(name, stored[name], shape) for name, shape in wanted.items() if name in stored]
    problems += [f"{name} has {one}, {expected} {other}" for name, one, other in both if one != other]
    left = [name for name in stored if name not in wanted]
    more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
    are = "is" if len(left) == 1 else "are"
    return problems + ([f"{', '.join(left[:_SHOWN])}{more} {are} not the model's"] if left else [])


def _differences(config: Mapping[str, Any] | None, cfg: Root) -> str:
    """Return the end of a message: the keys of model and data whose values differ from the checkpoint's."""
    differing = [
        f"{section}.{key}={value} in the checkpoint and {cfg[section].get(key)} in this command"
        for section in ("model", "data")
        for key, value in (config or {}).get(section, {}).items()
        if cfg[section].get(key) != value
    ]
    return f"; {', '.join(differing[:_SHOWN])}" if differing else ""


# -- resuming --------------------------------------------------------------------------------------------------------


def load_chosen(choose: Callable[[], Checkpoint | None], strategy: Strategy, optimizer: Optimizer) -> Checkpoint | None:
    """Load the checkpoint that rank 0 chooses. Other ranks may see an older state of a network folder.

    Args:
        choose: Returns the checkpoint, after comparing its checksums; None if there is none. Only rank 0 calls it.
        strategy: The model to load into.
        optimizer: The model's optimizer.

    Returns:
        The loaded checkpoint; None if there is none.

    Raises:
        CheckpointError: On every rank: the checkpoint is damaged, or does not fit.
    """
    first = strategy.mesh.rank == 0
    chosen = _together(strategy.mesh, lambda: choose() if first else None)
    path = strategy.mesh.gather(chosen and str(chosen.folder))[0]
    if path is None:
        return None
    return _load(_together(strategy.mesh, lambda: chosen or Checkpoint.find(Path(path))), strategy, optimizer)


def _together(mesh: Mesh, work: Callable[[], T]) -> T:
    """Return the result of ``work``; a CheckpointError on one rank is raised on every rank.

    The checksums of a large checkpoint may take longer than ranks wait for each other. The ranks therefore ask each
    other every second whether all ranks have finished.
    """
    result, finished = in_background(work), False
    while not finished:
        wait([result], _ASK_S)
        finished = all(mesh.gather(result.done()))
    failed = result.exception()
    if failed is not None and not isinstance(failed, CheckpointError):
        raise failed
    if (problem := next(filter(None, mesh.gather(failed and str(failed))), None)) is not None:
        raise CheckpointError(problem)
    return result.result()


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a thread that a process does not wait for at its end."""
    result: Future[T] = Future()
    threading.Thread(target=_finish, args=(result, work), name="checkpoint", daemon=True).start()
    return result


def _finish(result: Future[T], work: Callable[[], T]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:  # raised by the thread that waits
        result.set_exception(error)


def find_resumed(wanted: str, folder: Path) -> Checkpoint | None:
    """Return the checkpoint that ``train.resume`` names, and print it; None for a run that starts from the beginning.

    Args:
        wanted: A path; or "auto" for the newest checkpoint of this run directory whose checksums match. A warning
            names the damaged ones.
        folder: The ``checkpoints`` folder of this run directory.

    Raises:
        CheckpointError: The named checkpoint is damaged.
    """
    if wanted == AUTO:
        chosen = Checkpoint.newest(folder, True, lambda why: _warn(f"{why}; it is not used, and kept as {UNUSED}…"))
    else:
        chosen = Checkpoint.find(Path(wanted), verify=True)
    if chosen is None:
        print(f"train.resume=auto: no checkpoint in {folder} to resume from; this run starts at step 1", flush=True)
        return None
    print(f"resuming from {chosen.folder}", flush=True)
    return chosen


def make_newest(wanted: str, folder: Path, loaded: Checkpoint | None) -> None:
    """Make the loaded checkpoint the newest one of this run directory, if it is in this directory.

    Newer checkpoints (damaged or passed over) are renamed. Rank 0 calls this when nothing refuses the run.
    """
    if not folder.is_dir() or (loaded is not None and loaded.folder.parent != folder.resolve()):
        return
    step, best = (0, None) if loaded is None else (loaded.step, loaded.best_step)
    try:
        for newer in step_folders(folder):
            if step_of(newer) > step:
                renamed = set_aside(newer)
                if wanted != AUTO:  # the damaged ones have been named already
                    _warn(f"{newer} is kept as {renamed.name}: this run continues from step {step}")
        for name, number in ((LATEST, step), (BEST, best)):
            if number is not None and (folder / step_name(number)).is_dir():
                update_link(folder, name, step_name(number))
            elif (folder / name).is_symlink():
                (folder / name).unlink()
    except OSError as error:
        _warn(f"{folder} cannot be changed: {error}")


def after_restart(cfg: Any, run_dir: Path) -> Any:
    """Return the configuration of a run that its launcher has started again.

    The run continues from its newest checkpoint, or, before it has one, from ``train.resume``'s checkpoint.
    """
    anew = cfg.train.resume is None or Checkpoint.newest(run_dir / "checkpoints") is not None
    return with_values(cfg, {"train.resume": AUTO}) if anew else cfg


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
