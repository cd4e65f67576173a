"""The optimizer over this rank's share of the parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from common.errors import TrainingError
from parallel.dtensor import is_sharded, local
from parallel.pieces import Boxes, Piece
from parallel.strategy import Strategy
from training.optimizer.average import Average
from training.optimizer.groups import build_optimizer
from training.optimizer.kinds import PER_PARAMETER, update_of
from training.optimizer.muon import ExactMuon, hidden_matrices

log = logging.getLogger("training")
_FUSED = ("cpu", "cuda", "mps")


class Optimizer:
    """The optimizer of a configuration over this rank's parameters. It does nothing on a rank without parameters.

    Weight decay applies to matrices; biases and the scales of norms are left out unless ``decay_vectors`` is set.
    ``decays`` maps modules to the weight decay of their parameters; of several modules around a parameter, the
    innermost counts. ``rates`` maps modules to factors on the learning rate of their parameters. If the section has
    ``others``, the optimizer (Muon) updates the matrices of hidden layers, and a second one all other parameters; see
    ``hidden_matrices``. One fused kernel updates all parameters of one rate if the optimizer and the device have it.

    If parameters are sharded, an elementwise optimizer updates this rank's box as a plain tensor. An optimizer that
    needs whole tensors updates one parameter after the other: the parameter, its gradient and its state are gathered,
    every rank computes the same update, and each rank keeps its box.

    Args:
        config: The section ``optim`` as plain data.
        strategy: The model whose parameters to optimize.
        averaging: See ``Average``.

    Attributes:
        average: The average of the weights, which the model holds in evaluations.
        base_lr: The learning rate that a schedule's factor applies to.
        kind: The optimizer's ``_target_``, and that of ``others`` if there is one.
    """

    def __init__(self, config: Mapping[str, Any], strategy: Strategy, averaging: Any = None) -> None:
        self.average = Average(strategy, averaging)
        self.base_lr: float = config["lr"]
        self.kind, others = config["_target_"], config.get("others")
        if others:
            self.kind += f" for the matrices of hidden layers and {others['_target_']} for the others"
        self._parts: list[_Part] = []
        parameters = [(name, p) for name, p in strategy.named_parameters() if p.requires_grad]
        first = dict(parameters).keys() if others is None else hidden_matrices(strategy.chain)
        matrices = [(name, p) for name, p in parameters if name in first]
        rest = [(name, p) for name, p in parameters if name not in first]
        shared = {key: config.get(key) for key in ("decay_vectors", "rates", "decays")}
        for section, own in ((config, matrices), (others or config, rest)):
            section, together = {**section, **shared}, []
            for name, parameter in own:
                if update_of(section) == PER_PARAMETER and strategy.placement(name, parameter).axes:
                    self._parts.append(_Part(section, [(name, parameter)], strategy, gathers=True))
                else:
                    together.append((name, parameter))
            if together:
                self._parts.append(_Part(section, together, strategy, gathers=False))
        self._part_of = {parameter: part for part in self._parts for parameter in part.parameters}
        # All learning rates follow one schedule, each scaled by its ratio to the base rate.
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["ratio"] = group["lr"] / self.base_lr if self.base_lr else 1.0

    @property
    def made(self) -> list[torch.optim.Optimizer]:
        """The objects of the classes that the configuration names."""
        return [part.optimizer for part in self._parts]

    @property
    def has_modes(self) -> bool:
        """Whether an optimizer changes tensors in the switch between training and evaluation (schedule-free ones)."""
        return any(callable(getattr(optimizer, "eval", None)) for optimizer in self.made)

    def step(self, lr: float) -> None:
        """Update the parameters once at learning rate ``lr``. Ranks with parts of one parameter call this together."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = lr * group["ratio"]
            part.step()

    def train(self, training: bool = True) -> None:
        """Switch to the weights for training or for evaluation: to an average, or of an optimizer with modes."""
        if training:
            self.average.swap(False)
        for part in self._parts:
            switch = getattr(part.optimizer, "train" if training else "eval", None)
            if callable(switch):
                switch()
        if not training:
            self.average.swap(True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to the weights for evaluation and saving within the block."""
        self.train(False)
        try:
            yield
        finally:
            self.train()

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, Piece]:
        """Return this rank's pieces of the optimizer's tensors for a parameter, such as exp_avg; {} before a step."""
        part = self._part_of.get(parameter)
        return {} if part is None else part.state_of(parameter)

    def load_state_of(self, parameter: torch.nn.Parameter, state: Mapping[str, Boxes]) -> None:
        """Replace the optimizer's tensors for a parameter. ``step`` counters stay on the device where torch keeps them.

        Args:
            parameter: A parameter of this rank.
            state: Whole tensors, or objects that return boxes of them. For sharded parameters, this rank's box is read.
        """
        if parameter in self._part_of:
            self._part_of[parameter].load_state_of(parameter, state)


class _Part:
    """A torch optimizer. Plain tensors replace the parameters sharded by FSDP2; other parameters are updated directly.

    If ``gathers``, the parameters are gathered for the update. ``parameters`` maps each parameter to its tensor.
    """

    def __init__(
        self, config: Mapping, parameters: list[tuple[str, nn.Parameter]], strategy: Strategy, gathers: bool
    ) -> None:
        self._strategy, self._gathers = strategy, gathers
        self._names = {parameter: name for name, parameter in parameters}
        self.parameters = {parameter: self._stand_in(parameter) for _, parameter in parameters}
        fused = strategy.device.type in _FUSED and all(s.device == strategy.device for s in strategy.stages)
        own = [(name, self.parameters[parameter]) for name, parameter in parameters]
        self.optimizer = build_optimizer(config, own, fused)
        if strategy.plan.precision in ("fp32", "fp64") and type(self.optimizer) is torch.optim.Muon:
            self.optimizer = ExactMuon(self.optimizer.param_groups, **self.optimizer.defaults)
        groups = [(group, _own_values(group)) for group in self.optimizer.param_groups]
        # For each updated tensor: its group, and the group's initial values.
        self._groups = {own: pair for pair in groups for own in pair[0]["params"]}
        # For each gathered parameter: the names of the states that are divided over ranks between updates.
        self._divided: dict[Tensor, set[str]] = {}
        self._resumed = self._warned = False
        if gathers:
            self._scatter()

    def _stand_in(self, parameter: nn.Parameter) -> Tensor:
        if self._gathers:
            return self._whole(parameter, parameter.detach())
        return local(parameter.detach()) if is_sharded(parameter) else parameter

    def _piece(self, parameter: nn.Parameter) -> Piece:
        return self._strategy.piece(self._names[parameter], parameter)

    def _whole(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        return self._strategy.placement(self._names[parameter], parameter).whole(local(part), self._strategy.mesh)

    @torch.no_grad()
    def step(self) -> None:
        if self._gathers:
            self._gather()
        for parameter, own in self.parameters.items():
            if own is not parameter and parameter.grad is not None:
                own.grad = self._whole(parameter, parameter.grad) if self._gathers else local(parameter.grad)
        try:
            self.optimizer.step()
        except KeyError as error:
            if not self._resumed:
                raise
            raise TrainingError(
                f"optim: {type(self.optimizer).__name__} needs the state {error} of each parameter, and the checkpoint "
                "has none: resume without the option that was typed for it. If the optimizer keeps it as a list, it "
                "cannot be resumed"
            ) from error
        for parameter, own in self.parameters.items():
            if own is not parameter:
                own.grad = None
            elif own in self.optimizer.state and not type(self.optimizer).__module__.startswith("torch.optim."):
                self._copy_gradient(own)
        if self._gathers:
            self._scatter()

    def _copy_gradient(self, own: Tensor) -> None:
        """Copy a gradient that the state keeps as it is: DDP writes the next one into the same memory."""

        def is_gradient(value: Any) -> bool:
            return torch.is_tensor(value) and own.grad is not None and _memory(value) == _memory(own.grad)

        state = self.optimizer.state[own]
        state.update(tree_map(lambda value: value.clone() if is_gradient(value) else value, dict(state)))

    def _gather(self) -> None:
        for parameter, own in self.parameters.items():
            own.data = self._whole(parameter, parameter.detach())
            state = self.optimizer.state.get(own, {})
            state.update({key: self._whole(parameter, state[key]) for key in self._divided[own]})

    @torch.no_grad()
    def _scatter(self) -> None:
        """Keep this rank's part of the whole tensors."""
        for parameter, own in self.parameters.items():
            piece, state = self._piece(parameter), self.optimizer.state.get(own, {})
            piece.tensor.copy_(piece.read(own))
            tensors = {key: value for key, value in state.items() if torch.is_tensor(value)}
            self._divided[own] = {key for key, value in tensors.items() if tuple(value.shape) == piece.shape}
            state.update({key: piece.read(state[key]).clone() for key in self._divided[own]})
            own.data = own.new_zeros(()).expand(piece.shape)  # keeps the shape without memory

    def state_of(self, parameter: nn.Parameter) -> dict[str, Piece]:
        own = self.parameters[parameter]
        state = dict(self.optimizer.state.get(own, {}))
        group, at_first = self._groups[own]
        now = _own_values(group).items()
        changed = {f"{_GROUP}{key}": value for key, value in now if not _equal(value, at_first.get(key))}
        whole = self.optimizer.state.items()
        shared = {f"{_SHARED}{key}": value for key, value in whole if not torch.is_tensor(key)}
        found = state | changed | shared
        named = {key: value for key, value in found.items() if isinstance(key, str)}
        numbers = {key: value for key, value in named.items() if type(value) in _KINDS.values()}
        plain = {f"{k}{_PLAIN}{type(v).__name__}": torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
        tensors = {key: value for key, value in named.items() if torch.is_tensor(value)}
        # A checkpoint has what parameters share with each of them.
        tensors = {key: value for key, value in tensors.items() if key in state or value.numel() == 1}
        lost = [str(key) for key, value in found.items() if value is not None and key not in numbers | tensors]
        if lost and not self._warned:
            self._warned = True
            log.warning(
                "optim: %s keeps %s as neither a number nor a named tensor of a parameter: checkpoints do not have "
                "that, and a resumed run begins with its first value",
                type(self.optimizer).__name__,
                ", ".join(lost),
            )
        of_its_shape = {key for key, value in tensors.items() if value.shape == own.shape and key in state}
        divided, piece = self._divided[own] if self._gathers else of_its_shape, self._piece(parameter)
        return {
            key: piece._replace(tensor=value) if key in divided else Piece.of_whole(value)
            for key, value in (tensors | plain).items()
        }

    def load_state_of(self, parameter: nn.Parameter, state: Mapping[str, Boxes]) -> None:
        own = self.parameters[parameter]
        self._resumed = True
        group, at_first = self._groups[own]
        for key in _own_values(group).keys() - at_first.keys():
            del group[key]
        group.update(_own_values(at_first))  # a checkpoint has only the values that had changed
        loaded, piece = {}, self._piece(parameter)
        self.optimizer.state[own] = loaded
        places = {_GROUP: group, _SHARED: self.optimizer.state, "": loaded}
        for key, value in state.items():
            name, plain, kind = key.partition(_PLAIN)
            place = next(prefix for prefix in places if name.startswith(prefix))
            if not plain and not place:
                loaded[key] = _placed_as(piece, key, value, group)
                continue
            one = _KINDS[kind](value[...].item()) if plain else value[...].to(piece.tensor.device, copy=True)
            places[place][name.removeprefix(place)] = one
        self._divided[own] = {key for key in loaded if key in state and tuple(state[key].shape) == piece.shape}


# Names of plain numbers in a checkpoint: "d#float" of a parameter, "group.k#int" of the parameter's group (Prodigy).
# "shared.k" is what the optimizer keeps once for all parameters (MADGRAD).
_PLAIN, _GROUP, _SHARED = "#", "group.", "shared."
_KINDS = {"int": int, "float": float, "bool": bool}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group that an optimizer may change. The schedule sets the learning rate."""
    own = {key: value for key, value in group.items() if key not in ("params", "lr", "ratio")}
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in own.items()}


def _equal(value: Any, other: Any) -> bool:
    if torch.is_tensor(value) and torch.is_tensor(other):
        return torch.equal(value, other)
    try:
        return bool(value == other)
    except (RuntimeError, TypeError, ValueError):  # arrays
        return value is other


def _placed_as(piece: Piece, key: str, value: Boxes, group: Mapping[str, Any]) -> Tensor:
    """Return this rank's part of a state tensor. ``piece`` is this rank's piece of the parameter.

    The part is on the parameter's device and in the parameter's memory order, because fused kernels walk both together.
    """
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return value[...].cpu().clone()  # the host reads it in every update
    if tuple(value.shape) != piece.shape:
        return value[...].to(piece.tensor.device, copy=True)  # not the file's pages
    own = piece.read(value)
    return torch.empty_like(piece.tensor, dtype=own.dtype, requires_grad=False).copy_(own)
