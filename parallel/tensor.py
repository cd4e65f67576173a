"""Tensor parallelism: ranks share every layer, and each computes with a part of its matrices (``models.cut``).

    x --enter--> columns of this rank --> ... --> rows of this rank --leave--> y

    parallel.sequence    enter: forward, backward             leave: forward, backward
    false                x as it is, sum over the ranks       sum over the ranks, as it is
    true                 all-gather, reduce-scatter           reduce-scatter, all-gather

Without ``parallel.sequence`` all ranks have the whole of what lies between such regions. With it each has a part of the
sequence, dimension 1, of what the layers after the first one pass on; a first layer, and a last one without a cut
vocabulary, are computed as without it. Ranks draw the dropout masks of their part of the whole tensor, and compute the
same loss.

What goes wrong elsewhere, and what is done about it here:
* A parameter that is whole on every rank, and is applied to a part of a tensor, gets a summand of its gradient. Such
  are norms and biases between regions where the sequence is divided, and what lies inside a region without being cut
  (a norm of heads, a factor of LoRA). Their names are in ``Cutting.partial``; ``parallel.gradients`` adds the summands
  up, once, before the norm is taken.
* Parameters stay plain tensors: optimizers, FSDP2 and LoRA need not know. ``TensorParallel.split`` has the division of
  each by its name.
* Queries, keys and values enter their region with one tensor. It is gathered once, and its gradient is added up once.
* Where ``tp`` is larger than the number of key heads, each rank computes all of them and uses one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import PlanError
from models.chain import Chain
from models.cut import Columns, CutOf, Region, Rows, cut_of, is_divided
from models.fused_cross_entropy import FusedHead
from models.lora import FrozenLinear, LoRALinear
from models.seeds import BySample, Part
from parallel.examination import backward_nodes
from parallel.mesh import TENSOR, Axis, Mesh, reduce_scatter
from parallel.partition import even_split
from parallel.placement import Split


class Cutting:
    """Cuts the layers of one rank, and computes them together with the other ranks along ``tensor``.

    Attributes:
        partial: The names of whole parameters whose gradients are to be added up over the ranks. Those inside a region
            are known after the first forward.
        index: This rank's place along the axis.
    """

    def __init__(self, chain: Chain, mesh: Mesh, sequence: bool) -> None:
        """Describe the ranks that share layers; with ``sequence`` they share the sequence between regions, too."""
        self.line, self.index, self.sequence = mesh.axis(TENSOR), mesh.axis(TENSOR).index, sequence
        self.partial: set[str] = set()
        self._chain = chain
        self._splits: dict[str, tuple[torch.Size, Split]] = {}  # with the shapes of parts, by canonical names
        # Whether a region is being computed; its input, and what its first products compute with in place of that.
        self._inside = False
        self._given: Tensor | None = None
        self._entered: Tensor | None = None
        # Whether all that enters this region has a gradient; which modules that are called inside get what it computed.
        self._traced = True
        self._of_region: dict[nn.Module, bool] = {}

    # -- regions -----------------------------------------------------------------------------------------------------

    def enter(self, x: Tensor, divided: bool) -> Tensor:
        """Begin a region, or go on with the same input, [b, t, ...]; a part of the sequence if it is ``divided``."""
        if x is self._entered:
            return x
        if self._given is not x:
            given = x
            if torch.is_autocast_enabled(x.device.type):  # the products would cast it, after it was sent
                x = x.to(torch.get_autocast_dtype(x.device.type))
            self._given, self._entered = given, _Sent.apply(x, *_ENTER[divided], self.line)
            self._traced &= given.requires_grad
        self._inside = True
        assert self._entered is not None  # it was just set
        return self._entered

    def end(self) -> None:
        """End a region."""
        self._inside, self._given, self._entered, self._traced = False, None, None, True

    # -- tensors -----------------------------------------------------------------------------------------------------

    def split(self, name: str, tensor: Tensor) -> Split | None:
        """Return how a parameter, or a tensor of its shape, is divided; None for a tensor of another shape."""
        shape, split = self._splits.get(name, (None, None))
        return split if tensor.shape == shape else None

    # -- cutting -----------------------------------------------------------------------------------------------------

    def cut(self, layer_name: str, layer: nn.Module) -> None:
        """Reduce a layer to this rank's part, in place."""
        # A recomputation ends with the last tensor that the backward needs, which may be inside a region.
        layer.register_forward_pre_hook(lambda *_: self.end())
        names = self._chain.names
        first, last = layer_name == names[0], layer_name == names[-1]
        divided = self.sequence and is_divided(self._chain.cut, names, layer_name, layer)
        within: dict[nn.Module, CutOf] = {}
        for name, module in list(layer.named_modules(prefix=layer_name)):
            how = cut_of(self._chain.cut, name)
            if how is not None:
                within[module] = how
                self._cut_module(name, module, how, layer, divided)
        # An adapter drops out of its input, which columns get whole.
        adapted = (m for m, how in within.items() if isinstance(how, Columns) and isinstance(m, LoRALinear))
        of_whole = {adapter.lora_dropout for adapter in adapted}
        for name, module in layer.named_modules(prefix=layer_name):
            if isinstance(module, BySample):
                module.part = partial(self._part_of, module, module in of_whole, divided)
                module.register_forward_pre_hook(self._follow)
            own = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
            uncut = [key for key in own if self._chain.canonical(key) not in self._splits]
            if divided:
                self.partial.update(uncut)
            elif uncut and not isinstance(within.get(module), Rows):
                module.register_forward_pre_hook(partial(self._note, uncut))
        if divided and hasattr(layer, "parts"):  # it computes with something for the whole sequence
            setattr(layer, "parts", self.line.size)  # noqa: B010  # its stub knows tensors only
        if self.sequence and first and not last:
            layer.register_forward_hook(self._divide)
        if self.sequence and last and not first and not divided:
            layer.register_forward_pre_hook(self._make_whole)

    def _cut_module(self, name: str, module: nn.Module, how: CutOf, layer: nn.Module, divided: bool) -> None:
        if isinstance(how, Columns):
            self._cut_columns(name, module, how, divided)
        elif isinstance(how, Region):
            module.register_forward_pre_hook(partial(self._enter_first, divided), with_kwargs=True)
        elif isinstance(how, Rows):
            assert isinstance(module, nn.Linear)  # as the plan has checked
            self._replace(name, module, "weight", dim=1)
            if isinstance(module, LoRALinear):
                self._replace(f"{name}.lora_A", module.lora_A, "weight", dim=1)
            module.forward = partial(self._rows, name, module, divided)  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(module, nn.Embedding):
            (words,) = self._replace(name, module, "weight").ranges(self.index)
            module.forward = partial(self._embed, module, words)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            assert isinstance(layer, FusedHead)  # as the plan has checked
            splits = {key: self._replace(name, module, key) for key, _ in [*module.named_parameters(recurse=False)]}
            layer.words = Words(self, splits["weight"], divided)

    def _cut_columns(self, name: str, module: nn.Module, how: Columns, divided: bool) -> None:
        module.register_forward_pre_hook(partial(self._enter_first, divided), with_kwargs=True)
        heads = how.heads(module)
        if heads < self.line.size:  # each rank computes all of them and uses one
            start = self.index * heads // self.line.size * how.unit

            def own_head(_: nn.Module, given: tuple, output: Tensor) -> Tensor:
                return output.unflatten(-1, (how.groups, -1)).narrow(-1, start, how.unit).flatten(-2)

            module.register_forward_hook(own_head)
            return
        for key, _ in [*module.named_parameters(recurse=False)]:
            self._replace(name, module, key, groups=how.groups)
        if isinstance(module, LoRALinear):
            self._replace(f"{name}.lora_B", module.lora_B, "weight", groups=how.groups)

    def _replace(self, name: str, module: nn.Module, key: str, dim: int = 0, groups: int = 1) -> Split:
        """Keep this rank's part of a module's parameter, and return how it was divided."""
        parameter = module.get_parameter(key)
        split = Split(TENSOR, dim, tuple(even_split(parameter.shape[dim] // groups, self.line.size)), groups)
        part = nn.Parameter(split.part(parameter.detach(), self.index), parameter.requires_grad)
        setattr(module, key, part)
        self._splits[self._chain.canonical(f"{name}.{key}")] = part.shape, split
        return split

    # -- computing ---------------------------------------------------------------------------------------------------

    def _enter_first(self, divided: bool, module: nn.Module, given: tuple, named: dict) -> tuple[tuple, dict]:
        if given:
            return (self.enter(given[0], divided), *given[1:]), named
        key = next(key for key, value in named.items() if isinstance(value, Tensor))
        return given, {**named, key: self.enter(named[key], divided)}

    def _note(self, names: list[str], module: nn.Module, given: tuple) -> None:
        self._follow(module, given)
        if self._gets_part(module):
            self.partial.update(names)

    def _gets_part(self, module: nn.Module) -> bool:
        """Return whether a module is called inside a region and gets what was computed there."""
        return self._inside and self._of_region.get(module, True)

    def _follow(self, module: nn.Module, given: tuple) -> None:
        """Find out, once, where the input of a module that is called inside a region comes from.

        It may get a whole tensor, as the norm of the keys' input does if queries are computed first. Where there are no
        gradients to follow, it is assumed to get a part.
        """
        known = module in self._of_region or torch.compiler.is_compiling() or not given
        if self._inside and not known and self._traced and isinstance(given[0], Tensor):
            self._of_region[module] = given[0].requires_grad and _follows_enter(given[0])

    def _rows(self, name: str, module: nn.Linear, divided: bool, x: Tensor) -> Tensor:
        """Compute a linear layer of which each rank has some inputs, which ends the region."""
        if not self._inside:
            raise PlanError(
                f"parallel.tp={self.line.size}: the region of {name}, which has Rows(), has ended with other Rows() "
                "before it. Dropout and parameters in between would be those of a whole tensor: compute the Columns() "
                f"of {name} after those other Rows(), or set parallel.tp=1"
            )
        y = module.computed(x, None) if isinstance(module, FrozenLinear) else F.linear(x, module.weight)
        self.end()
        y = _Sent.apply(y, *_LEAVE[divided], self.line)  # the sum, or a part of it as ``enter`` got one
        return y if module.bias is None else y + module.bias.to(y.dtype)

    def _embed(self, module: nn.Embedding, words: slice, tokens: Tensor) -> Tensor:
        """Look up tokens [b, t], of which this rank has the range ``words`` of the vocabulary."""
        others = (tokens < words.start) | (tokens >= words.stop)
        rows = F.embedding((tokens - words.start).masked_fill(others, 0), module.weight)
        return _Sent.apply(rows.masked_fill(others[..., None], 0.0), *_LEAVE[False], self.line)

    def _divide(self, module: nn.Module, given: tuple, output: Any) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() < 3 or output.shape[1] % self.line.size:
            shape = tuple(output.shape) if isinstance(output, Tensor) else "several tensors"
            raise PlanError(
                "parallel.sequence=true divides dimension 1 of what the first layer returns, [b, t, ...], among "
                f"parallel.tp={self.line.size} ranks, and that is {shape}; set data.seq_len to a multiple, or leave "
                "parallel.sequence out"
            )
        return _Sent.apply(output, _own, _all_gather, self.line)  # from the whole, which all ranks have

    def _make_whole(self, module: nn.Module, given: tuple) -> tuple:
        # All ranks compute the same with the whole.
        return _Sent.apply(given[0], _all_gather, _own, self.line), *given[1:]

    def _part_of(self, module: BySample, whole: bool, divided: bool, shape: Sequence[int], samples: int) -> Part | None:
        """Return which part of a whole mask this rank has: heads, columns or positions; None for all of it."""
        spread = module.spread
        if self._gets_part(module):
            dim = 1 if len(shape) == 4 else len(shape) - 1
            if whole or (spread is not None and spread <= dim):  # all columns share a number
                return None
            inner = math.prod(shape[dim:])
        elif divided:
            inner = math.prod(shape) // samples  # positions are the outermost dimension of a sample
        else:
            return None
        return Part(inner, inner * self.line.size, inner * self.index)


class Words:
    """The words that this rank has of the vocabulary, for a ``FusedHead``.

    Attributes:
        start: The first of them.
        count: The number of all ranks' words.
    """

    def __init__(self, cutting: Cutting, split: Split, divided: bool) -> None:
        self._cutting, self._split, self._divided = cutting, split, divided
        self.start, self.count = split.ranges(cutting.index)[0].start, split.size

    def enter(self, hidden: Tensor) -> Tensor:
        """Return what all words are computed from, [b, t, c]."""
        entered = self._cutting.enter(hidden, self._divided)
        self._cutting.end()
        return entered

    def largest(self, numbers: Tensor) -> Tensor:
        """Return the largest of all ranks' numbers, element by element."""
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._cutting.line.group)
        return numbers

    def sum(self, numbers: Tensor) -> Tensor:
        """Return the sum of all ranks' numbers, element by element."""
        dist.all_reduce(numbers, group=self._cutting.line.group)
        return numbers

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all words, [b, t, v], from those of this rank's."""
        return replace(self._split, dim=logits.dim() - 1).gather(logits, self._cutting.line)


# -- operators: x is [b, t, ...] ---------------------------------------------------------------------------------------

Operator = Callable[[Tensor, Axis], Tensor]


def _all_gather(x: Tensor, line: Axis) -> Tensor:
    return torch.cat(line.all_gather(x), dim=1)


def _all_reduce(x: Tensor, line: Axis) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=line.group)
    return total


def _reduce_scatter(x: Tensor, line: Axis) -> Tensor:
    parts = torch.cat(x.chunk(line.size, dim=1))
    total = parts.new_empty(len(x), *parts.shape[1:])
    reduce_scatter(total, parts, group=line.group)
    return total


def _own(x: Tensor, line: Axis) -> Tensor:
    return x.chunk(line.size, dim=1)[line.index].contiguous()


def _as_it_is(x: Tensor, line: Axis) -> Tensor:
    return x.view_as(x)


class _Sent(torch.autograd.Function):
    """Computes ``there(x)``, and the gradient of x by ``back`` from that of the result."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Operator, back: Operator, line: Axis) -> Tensor:
        ctx.back, ctx.line = back, line
        return there(x, line)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.back(gradient, ctx.line), None, None, None


def _follows_enter(x: Tensor) -> bool:
    """Return whether a tensor was computed from what a region was entered with, and not from its result alone."""
    sent = backward_nodes([x], lambda node: hasattr(node, "back"))  # down to ``_Sent``
    return any(getattr(node, "back", None) in (_all_reduce, _reduce_scatter) for node in sent)


# What enters a region, forward and backward, by whether it is divided; what leaves it, the other way round.
_ENTER: dict[bool, tuple[Operator, Operator]] = {False: (_as_it_is, _all_reduce), True: (_all_gather, _reduce_scatter)}
_LEAVE = {divided: (back, there) for divided, (there, back) in _ENTER.items()}
