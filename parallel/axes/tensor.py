"""Tensor parallelism: all ranks compute every layer, each rank with a part of its matrices (``models.cut``).

    x --enter--> columns of this rank --> ... --> rows of this rank --leave--> y

    parallel.sequence    enter: forward, backward             leave: forward, backward
    false                identity, all-reduce                 all-reduce, identity
    true                 all-gather, reduce-scatter           reduce-scatter, all-gather

By default, activations outside these regions are replicated on all ranks. With ``parallel.sequence=true`` they are
split along dimension 1 (the sequence). In the first layer they are never split, and in the last layer only if its
vocabulary is split. Each rank draws its part of the whole dropout mask, and all ranks compute the same loss.

Known pitfalls of tensor parallelism, and how this module handles them:
* The gradient of a replicated parameter that is applied to a sharded activation is partial: it must be summed over the
  ranks. This concerns norms and biases between regions if the sequence is split, and uncut parameters inside a region
  (a norm of heads, a LoRA factor). Their names are in ``TensorParallel.needs_sum``. ``finish_gradients`` sums their
  gradients, once, before the gradient norm is computed.
* Parameters stay plain tensors, so optimizers, FSDP2 and LoRA need no changes. ``Axis.splits`` has the
  division of each parameter by its name.
* Queries, keys and values enter their region with one tensor. It is gathered once, and its gradient is added up once.
* If ``tp`` is larger than the number of key heads, each rank computes all key heads and uses one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import PlanError
from data.dataset import Batch, DataSet
from models.chain import Chain, Layers, Tensors, as_tuple, is_within
from models.cut import Columns, CutOf, Experts, GatherInput, Rows, check_cuts, cut_of, is_divided
from models.fused_cross_entropy import FusedHead
from models.lora import FrozenLinear, LoRALinear
from models.seeds import BySample, Part, Parts
from parallel.axes.axis import AxisOfStage, Collective, all_reduce_sum
from parallel.dtensor import local
from parallel.examination import backward_nodes
from parallel.layout import Layout
from parallel.mesh import TENSOR, Mesh, Ranks, reduce_scatter
from parallel.partition import even_split
from parallel.placement import Split
from parallel.plan import Plan
from parallel.strategies import StrategyInfo


class TensorParallel(AxisOfStage):
    """Splits every layer among the ranks along ``tensor``.

    Attributes:
        needs_sum: The names of replicated parameters with partial gradients, which must be summed over the ranks. The
            names of parameters inside a region are known after the first forward.
    """

    mesh_axes = (TENSOR,)
    degree, divides = "tp", "layers"
    keys = ("tp", "sequence")
    variants = ({"tp": 2}, {"tp": 2, "sequence": True})
    hint = "The table of Columns() and Rows() may be wrong, which mode=verify shows"

    # -- before a run ------------------------------------------------------------------------------------------------

    @classmethod
    def check_keys(cls, section: Any, info: StrategyInfo) -> None:
        """See ``Axis.check_keys``."""
        super().check_keys(section, info)
        if section.sequence and section.tp == 1:
            raise PlanError("parallel.sequence=true divides the sequence among parallel.tp ranks; set parallel.tp=2")

    @classmethod
    def check(cls, layout: Layout, chain: Chain, skeleton: Layers) -> None:
        """See ``Axis.check``."""
        if layout.tp > 1:
            check_cuts(chain.cut, chain.tied, chain.names, skeleton, layout.tp, layout.sequence)

    @classmethod
    def check_stages(cls, layout: Layout, chain: Chain, skeleton: Layers, stages: Iterable[Sequence[str]]) -> None:
        """Check that a stage's tied layers, unless their parameter is divided, have the same part of the sequence.

        Raises PlanError.
        """
        if not layout.sequence or not chain.tied:
            return
        divided = {name: is_divided(chain.cut, chain.names, name, layer) for name, layer in skeleton.items()}
        for stage in stages:
            for pair in chain.tied.items():
                owners = [name for parameter in pair for name in stage if is_within(parameter, [name])]
                is_whole = cut_of(chain.cut, pair[0].rpartition(".")[0]) is None
                if is_whole and len({divided[name] for name in owners}) > 1:
                    raise _uneven(*pair)

    @classmethod
    def check_data(cls, layout: Layout, data: DataSet) -> None:
        """See ``Axis.check_data``."""
        if not layout.sequence:
            return
        sample = Batch(*data.train.read(np.zeros(1, dtype=np.int64), 0))
        dim = 1 + data.pairs
        widths = {*getattr(data.train, "widths", ()), *(t.shape[dim] for t in sample.input_tensors if t.dim() > dim)}
        if uneven := sorted(width for width in widths if width % layout.tp):
            raise PlanError(
                f"parallel.sequence=true divides each sequence among parallel.tp={layout.tp} ranks, and there are "
                f"sequences of {', '.join(map(str, uneven))} positions; set data.seq_len to a multiple of {layout.tp}, "
                "or leave parallel.sequence out"
            )

    @classmethod
    def choices(cls, chain: Chain, data: DataSet, fixed: Mapping[str, Any], max_ranks: int) -> list[dict[str, Any]]:
        """See ``Axis.choices``. If possible, the ranks also split the sequence."""
        skeleton, sizes = chain.skeleton(), {}
        stages = [] if "sequence" in fixed else [chain.names]
        for tp in [fixed["tp"]] if "tp" in fixed else range(1, 1 + (max_ranks if chain.cut else 1)):
            for sequence in sorted({fixed.get("sequence", False), tp > 1 and fixed.get("sequence", True)}):
                layout = Layout(tp=tp, sequence=sequence)
                try:
                    cls.check(layout, chain, skeleton)
                    cls.check_data(layout, data)
                    cls.check_stages(layout, chain, skeleton, stages)
                except PlanError:
                    if "tp" in fixed and tp not in sizes:
                        raise
                    break
                sizes[tp] = sequence
        return [{"tp": tp, "sequence": tp > 1 and sequence} for tp, sequence in sizes.items()]

    @classmethod
    def work_of_rank(cls, layout: Layout, work: Any) -> Any:
        """See ``Axis.work_of_rank``."""
        return work.divided(layout.tp, layout.sequence)

    @classmethod
    def collectives(cls, layout: Layout, work: Any) -> Sequence[Collective]:
        """See ``Axis.collectives``. A block has two regions: the output and the gradient of each are all-reduced."""
        return [Collective("all_reduce", 2, work.hidden, 2)] if work.queries else []

    @classmethod
    def boundary(cls, layout: Layout, x: Tensor) -> Tensor:
        """See ``Axis.boundary``."""
        return x[:, : x.shape[1] // layout.tp] if layout.sequence else x

    @classmethod
    def describe(cls, layout: Layout) -> str:
        """See ``Axis.describe``."""
        return f"{layout.tp} ranks share each layer" + ", and the sequence between its products" * layout.sequence

    @classmethod
    def across_nodes(cls, layout: Layout, nodes: int, sent: float) -> str | None:
        """See ``Axis.across_nodes``."""
        per_node = layout.processes // nodes
        if per_node % layout.ranks_per_stage == 0:
            return None
        mend = f"a parallel.tp that divides {per_node}" if per_node > 1 else "fewer nodes"
        return (
            f"the parallel.tp={layout.tp} ranks that share a layer lie on several of {nodes} nodes with {per_node} "
            f"process{'es' * (per_node > 1)} each: every layer sends {sent / 2**20:,.1f} MiB between nodes for each "
            f"micro-batch, forward and backward. Choose {mend}"
        )

    # -- in a rank ---------------------------------------------------------------------------------------------------

    def __init__(self, name: str, plan: Plan, chain: Chain, mesh: Mesh) -> None:
        """See ``Axis``."""
        super().__init__(name, plan, chain, mesh)
        self.needs_sum: set[str] = set()
        # The input of the current region, and the tensor with which its first products compute in place of the input.
        self._region_input: Tensor | None = None
        self._entered_input: Tensor | None = None
        # Whether every input of this region has a gradient; which modules called inside the region get a result of the
        # region.
        self._input_needs_grad = True
        self._input_from_region: dict[nn.Module, bool] = {}

    def finish_gradients(self, names: Mapping[nn.Parameter, Sequence[str]]) -> None:
        """Sum partial gradients. Raises PlanError if a gradient is partial under only some of the parameter's names."""
        partial_sums = [local(p.grad) for p, of in names.items() if p.grad is not None and self._is_partial(of)]
        all_reduce_sum(partial_sums, self.ranks.group)

    def end_step(self, stages: Iterable[nn.Module], training: bool) -> None:
        """See ``Axis.end_step``."""
        self.end_region()

    # -- regions -----------------------------------------------------------------------------------------------------

    def enter(self, x: Tensor, sequence_parallel: bool) -> Tensor:
        """Begin a region, or continue it for the same input: [b, t, ...], or this rank's part of the sequence."""
        if x is self._entered_input:
            return x
        if self._region_input is not x:
            given = x
            if torch.is_autocast_enabled(x.device.type):  # the products would cast it, after it was sent
                x = x.to(torch.get_autocast_dtype(x.device.type))
            self._region_input = given
            self._entered_input = _Collective.apply(x, *_ENTER[sequence_parallel], self.ranks)
            self._input_needs_grad &= given.requires_grad
        assert self._entered_input is not None  # it was just set
        return self._entered_input

    def end_region(self) -> None:
        """End a region."""
        self._region_input, self._entered_input, self._input_needs_grad = None, None, True

    # -- parameters --------------------------------------------------------------------------------------------------

    def _is_partial(self, names: Iterable[str]) -> bool:
        found = {name in self.needs_sum: name for name in names}
        if len(found) > 1:
            raise _uneven(found[True], found[False])
        return True in found

    # -- cutting -----------------------------------------------------------------------------------------------------

    def prepare(self, layer_name: str, layer: nn.Module, tied_in_stage: Sequence[str] = ()) -> None:
        """See ``Axis.prepare``."""
        # A recomputation may stop inside a region, so each forward first ends an open one.
        layer.register_forward_pre_hook(lambda *_: self.end_region())
        names = self.chain.names
        first, last = layer_name == names[0], layer_name == names[-1]
        sequence_parallel = self.plan.sequence and is_divided(self.chain.cut, names, layer_name, layer)
        within: dict[nn.Module, CutOf] = {}
        for name, module in list(layer.named_modules(prefix=layer_name)):
            how = cut_of(self.chain.cut, name)
            if how is not None and not isinstance(how, Experts):
                within[module] = how
                self._cut_module(name, module, how, layer, sequence_parallel)
        # An adapter applies dropout to its input. If the module is cut by columns, every rank has the whole input.
        adapted = (m for m, how in within.items() if isinstance(how, Columns) and isinstance(m, LoRALinear))
        of_whole = {adapter.lora_dropout for adapter in adapted}
        for name, module in layer.named_modules(prefix=layer_name):
            if isinstance(module, BySample):
                module.part = partial(self._part_of, module, module in of_whole, sequence_parallel)
                module.register_forward_pre_hook(self._follow)
            own = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
            uncut = [key for key in own if self.chain.canonical(key) not in self.splits]
            if sequence_parallel:
                self.needs_sum.update(uncut)
            elif uncut and not isinstance(within.get(module), Rows):
                module.register_forward_pre_hook(partial(self._note, uncut))
        for module in layer.modules() if sequence_parallel else ():
            if hasattr(module, "parts"):  # it computes with something for the whole sequence
                setattr(module, "parts", self.ranks.size)  # noqa: B010  # its stub knows tensors only
        if self.plan.sequence and first and not last:
            layer.register_forward_hook(self._split_sequence)
        if self.plan.sequence and last and not first and not sequence_parallel:
            layer.register_forward_pre_hook(self._gather_sequence)

    def _cut_module(self, name: str, module: nn.Module, how: CutOf, layer: nn.Module, sequence_parallel: bool) -> None:
        if isinstance(how, Columns):
            self._cut_columns(name, module, how, sequence_parallel)
        elif isinstance(how, GatherInput):
            module.register_forward_pre_hook(partial(self._enter_first, sequence_parallel), with_kwargs=True)
        elif isinstance(how, Rows):
            assert isinstance(module, nn.Linear)  # as the plan has checked
            self._replace(name, module, "weight", dim=1)
            if isinstance(module, LoRALinear):
                self._replace(f"{name}.lora_A", module.lora_A, "weight", dim=1)
                module.add_up = partial(_all_reduce, axis=self.ranks)
            forward = partial(self._rows, name, module, sequence_parallel)
            module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(module, nn.Embedding):
            (words,) = self._replace(name, module, "weight").ranges(self.ranks.index)
            module.forward = partial(self._embed, module, words)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            heads = (m for m in layer.modules() if isinstance(m, FusedHead) and m.projection is module)
            head = next(heads)  # as the plan has checked
            splits = {key: self._replace(name, module, key) for key, _ in [*module.named_parameters(recurse=False)]}
            head.vocabulary = VocabularyShard(self, splits["weight"], sequence_parallel)

    def _cut_columns(self, name: str, module: nn.Module, how: Columns, sequence_parallel: bool) -> None:
        module.register_forward_pre_hook(partial(self._enter_first, sequence_parallel), with_kwargs=True)
        heads = how.heads(module)
        if heads < self.ranks.size:  # each rank computes all key heads and uses one
            start = self.ranks.index * heads // self.ranks.size * how.unit

            def own_head(_: nn.Module, given: tuple, output: Tensor) -> Tensor:
                return output.unflatten(-1, (how.groups, -1)).narrow(-1, start, how.unit).flatten(-2)

            module.register_forward_hook(own_head)
            return
        for key, _ in [*module.named_parameters(recurse=False)]:
            self._replace(name, module, key, groups=how.groups)
        if isinstance(module, LoRALinear):
            for factor in ("lora_B", "lora_magnitude_vector"):
                if (of := getattr(module, factor)) is not None:
                    self._replace(f"{name}.{factor}", of, "weight", groups=how.groups)

    def _replace(self, name: str, module: nn.Module, key: str, dim: int = 0, groups: int = 1) -> Split:
        """Keep this rank's part of a module's parameter, and return the division."""
        parameter = module.get_parameter(key)
        split = Split(TENSOR, dim, tuple(even_split(parameter.shape[dim] // groups, self.ranks.size)), groups)
        part = nn.Parameter(split.part(parameter.detach(), self.ranks.index), parameter.requires_grad)
        setattr(module, key, part)
        self.splits[self.chain.canonical(f"{name}.{key}")] = split
        return split

    # -- computing ---------------------------------------------------------------------------------------------------

    def _enter_first(self, sequence_parallel: bool, module: nn.Module, given: tuple, named: dict) -> tuple[tuple, dict]:
        if given:
            return (self.enter(given[0], sequence_parallel), *given[1:]), named
        key = next(key for key, value in named.items() if isinstance(value, Tensor))
        return given, {**named, key: self.enter(named[key], sequence_parallel)}

    def _note(self, names: list[str], module: nn.Module, given: tuple) -> None:
        self._follow(module, given)
        if self._gets_part(module):
            self.needs_sum.update(names)

    def _gets_part(self, module: nn.Module) -> bool:
        """Return whether a module is called inside a region and gets a result of this region."""
        return self._entered_input is not None and self._input_from_region.get(module, True)

    def _follow(self, module: nn.Module, given: tuple) -> None:
        """Determine, once, where the input of a module called inside a region comes from.

        The input may be a whole tensor, as it is for the norm of the keys' input if queries are computed first. Without
        gradients to follow, the input is assumed to be a part.
        """
        known = module in self._input_from_region or torch.compiler.is_compiling() or not given
        if self._entered_input is not None and not known and self._input_needs_grad and isinstance(given[0], Tensor):
            self._input_from_region[module] = given[0].requires_grad and _follows_enter(given[0])

    def _rows(self, name: str, module: nn.Linear, sequence_parallel: bool, x: Tensor) -> Tensor:
        """Compute a linear layer from this rank's inputs, and end the region."""
        if self._entered_input is None:
            raise PlanError(
                f"parallel.tp={self.ranks.size}: the region of {name}, which has Rows(), has ended with other Rows() "
                "before it. Dropout and parameters in between would be those of a whole tensor: compute the Columns() "
                f"of {name} after those other Rows(), or set parallel.tp=1"
            )
        y = module.computed(x, None) if isinstance(module, FrozenLinear) else F.linear(x, module.weight)
        self.end_region()
        y = _Collective.apply(y, *_LEAVE[sequence_parallel], self.ranks)  # the sum, or a part of it
        return y if module.bias is None else y + module.bias.to(y.dtype)

    def _embed(self, module: nn.Embedding, words: slice, tokens: Tensor) -> Tensor:
        """Look up tokens [b, t]. This rank has the range ``words`` of the vocabulary."""
        others = (tokens < words.start) | (tokens >= words.stop)
        rows = F.embedding((tokens - words.start).masked_fill(others, 0), module.weight)
        return _Collective.apply(rows.masked_fill(others[..., None], 0.0), *_LEAVE[False], self.ranks)

    def _split_sequence(self, module: nn.Module, given: tuple, output: Tensors) -> Tensors:
        tensors = as_tuple(output)
        if any(x.dim() < 3 or x.shape[1] % self.ranks.size or x.shape != tensors[0].shape for x in tensors):
            shape = ", ".join(str(tuple(x.shape)) for x in tensors)
            raise PlanError(
                "parallel.sequence=true divides dimension 1 of what the first layer returns, [b, t, ...], among "
                f"parallel.tp={self.ranks.size} ranks, and that is {shape}; set data.seq_len to a multiple, or leave "
                "parallel.sequence out"
            )
        # From the whole tensor on all ranks.
        parts = tuple(_Collective.apply(x, _local_chunk, _all_gather, self.ranks) for x in tensors)
        return parts if isinstance(output, tuple) else parts[0]

    def _gather_sequence(self, module: nn.Module, given: tuple) -> tuple:
        # All ranks compute the same result from the whole tensor.
        def whole(x: Tensor) -> Tensor:
            return _Collective.apply(x, _all_gather, _local_chunk, self.ranks) if x.shape == given[0].shape else x

        return tuple(map(whole, given))

    def _part_of(
        self, module: BySample, whole: bool, sequence_parallel: bool, shape: Sequence[int], samples: int
    ) -> Parts:
        """Return this rank's part of a whole mask: its heads, columns or positions; empty for the whole mask."""
        spread = module.spread
        if self._gets_part(module):
            dim = 1 if len(shape) == 4 else len(shape) - 1
            if whole or (spread is not None and spread <= dim):  # one number of the mask is for all columns
                return {}
            size = shape[dim]
        elif sequence_parallel:
            dim, size = (1, shape[1]) if len(shape) > 1 and shape[0] == samples else (0, shape[0] // samples)
        else:
            return {}
        return {dim: Part(range(size * self.ranks.index, size * (self.ranks.index + 1)), size * self.ranks.size)}


def _uneven(one: str, other: str) -> PlanError:
    """Return the error for a replicated parameter that is applied both to a sharded and to a whole tensor."""
    return PlanError(
        f"parallel.tp: {one} and {other} are one parameter of which no rank has a part. Ranks compute with it for "
        "different parts of the samples in the one and for the whole in the other, so their gradients cannot be added "
        "up; leave parallel.sequence out, or set parallel.tp=1"
    )


class VocabularyShard:
    """This rank's part of the vocabulary, for a ``FusedHead``.

    Attributes:
        start: The index of the first word.
        count: The number of words of all ranks.
    """

    def __init__(self, tensor_parallel: TensorParallel, split: Split, sequence_parallel: bool) -> None:
        self._tensor_parallel, self._split, self._sequence_parallel = tensor_parallel, split, sequence_parallel
        self.start, self.count = split.ranges(tensor_parallel.ranks.index)[0].start, split.size

    def enter(self, hidden: Tensor) -> Tensor:
        """Return the input of the logits of all words, [b, t, c]."""
        entered = self._tensor_parallel.enter(hidden, self._sequence_parallel)
        self._tensor_parallel.end_region()
        return entered

    def largest(self, numbers: Tensor) -> Tensor:
        """Return the maximum over all ranks' numbers, element by element."""
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._tensor_parallel.ranks.group)
        return numbers

    def sum(self, numbers: Tensor) -> Tensor:
        """Return the sum over all ranks' numbers, element by element."""
        dist.all_reduce(numbers, group=self._tensor_parallel.ranks.group)
        return numbers

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all words, [b, t, v], from the logits of each rank's words."""
        return replace(self._split, dim=logits.dim() - 1).gather(logits, self._tensor_parallel.ranks)


# -- operators: x is [b, t, ...] ---------------------------------------------------------------------------------------

Operator = Callable[[Tensor, Ranks], Tensor]


def _all_gather(x: Tensor, axis: Ranks) -> Tensor:
    return torch.cat(axis.all_gather(x), dim=1)


def _all_reduce(x: Tensor, axis: Ranks) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def _reduce_scatter(x: Tensor, axis: Ranks) -> Tensor:
    parts = torch.cat(x.chunk(axis.size, dim=1))
    total = parts.new_empty(len(x), *parts.shape[1:])
    reduce_scatter(total, parts, group=axis.group)
    return total


def _local_chunk(x: Tensor, axis: Ranks) -> Tensor:
    return x.chunk(axis.size, dim=1)[axis.index].contiguous()


def _identity(x: Tensor, axis: Ranks) -> Tensor:
    return x.view_as(x)


class _Collective(torch.autograd.Function):
    """Applies ``forward_op`` to x, and ``backward_op`` to the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, forward_op: Operator, backward_op: Operator, axis: Ranks) -> Tensor:
        ctx.backward_op, ctx.axis = backward_op, axis
        return forward_op(x, axis)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.backward_op(gradient, ctx.axis), None, None, None


def _follows_enter(x: Tensor) -> bool:
    """Return whether a tensor depends on the input of an open region, not only on the output of an ended region."""
    sent = backward_nodes([x], lambda node: hasattr(node, "backward_op"))  # down to ``_Collective``
    return any(getattr(node, "backward_op", None) in (_all_reduce, _reduce_scatter) for node in sent)


# The operators at the entry of a region, forward and backward, by ``sequence_parallel``; at the exit they are swapped.
_ENTER: dict[bool, tuple[Operator, Operator]] = {False: (_identity, _all_reduce), True: (_all_gather, _reduce_scatter)}
_LEAVE = {key: (back, there) for key, (there, back) in _ENTER.items()}
