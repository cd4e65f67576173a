"""What each layer receives, returns and keeps for the backward, inferred by running the chain on fake tensors.

Fake tensors have no memory but carry a device, so autocast acts on them as it will in the run. Plain meta tensors are
not cast, and a stage border declared float32 corrupts data silently if the run sends bfloat16.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.errors import PlanError
from data.dataset import Batch, Source
from models.batchnorm import StepBatchNorm
from models.chain import CPU, LOSS, Chain, Tensors, as_tuple, checked, converted, without_weights
from models.losses import Loss, copy_to_try, is_by_sample, loss_of, replicas
from models.seeds import Samples, computing, seeded
from parallel.devices import autocast, between_layers, parameter_dtype
from parallel.plan import Plan

_ASKED = 8  # samples for which a loss is asked
MOST_OUTPUTS = 10**7  # elements of the model's output above which a loss is not tried on made-up ones
_SAME = 1e-3  # relative difference of losses that may be rounding


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of one micro-batch that passes from one layer to the next, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = True

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Describe ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def divided(self, ranks: int) -> TensorSpec:
        """Return the part of the sequence that each of ``ranks`` ranks has."""
        batch, length, *others = self.shape
        return replace(self, shape=(batch, length // ranks, *others))

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class LayerTrace:
    """What was inferred about one layer.

    Attributes:
        outputs: The tensors that it returns; for the last layer, the loss.
        kept: Bytes that autograd holds for each micro-batch's backward.
        cast: Bytes of weights held in the compute dtype, once for all micro-batches of a step.
        random: Whether it draws random numbers in training.
        work: The context that ``trace`` made by ``counting`` and that has seen the operators of one micro-batch.
    """

    name: str
    outputs: tuple[TensorSpec, ...]
    kept: int
    cast: int
    random: bool
    work: Any = None

    @property
    def output_bytes(self) -> int:
        """Size of the tensors that the layer returns."""
        return sum(spec.bytes for spec in self.outputs)


@torch.enable_grad()
def trace(
    chain: Chain,
    sample: Batch,
    precision: str,
    device_type: str,
    counting: Callable[[], AbstractContextManager] = nullcontext,
) -> list[LayerTrace]:
    """Run one micro-batch through the chain on fake tensors; return one trace per layer.

    ``counting`` makes a context in which the operators of one micro-batch are called; the trace keeps it as ``work``.
    Where fake tensors lack an operator, the chain is run with its weights on the CPU. Where torch does not let a layer
    be watched by hooks (``torch.func.grad``), all that operators compute with counts as kept; where not at all
    (``flex_attention``), nothing is counted.

    Raises:
        PlanError: If a layer reads numbers out of its tensors.
        TypeError: If a layer returns neither a tensor nor a flat tuple of tensors.
    """
    try:
        return _trace(chain, sample, precision, device_type, counting, real=False)
    except (PlanError, ValueError):  # BatchNorm raises the latter for one sample
        raise
    except Exception:  # a user's code
        with seeded(0):
            return _trace(chain, sample, precision, "cpu", counting, real=True)


def _trace(
    chain: Chain, sample: Batch, precision: str, device_type: str, counting: Callable, real: bool
) -> list[LayerTrace]:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    dtype = parameter_dtype(precision)
    blank: dict[Callable, nn.Module] = {}  # outside of the mode, where an initialiser finds that there are no numbers
    for layer in chain.layers:
        if layer.build not in blank:
            blank[layer.build] = layer.made()
    traces, loss = [], copy_to_try(chain.loss)
    with nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True), autocast(precision, device_type):

        def fake(given: Tensor) -> Tensor:
            kind = dtype if given.is_floating_point() else given.dtype
            return given.to(kind) if real else torch.empty(given.shape, dtype=kind, device=device_type)

        tensors, targets = tuple(map(fake, sample.input_tensors)), fake(sample.targets)
        # A transformer's blocks are alike, except for the last layer of a chain, which computes the loss.
        alike: dict[tuple, tuple[LayerTrace, tuple[Tensor, ...]]] = {}
        for layer in chain.layers:
            key = layer.build, layer is chain.layers[-1], *((TensorSpec.of(t), t.stride()) for t in tensors)
            if key in alike:
                traced, tensors = alike[key]
                traces.append(replace(traced, name=layer.name))
                continue
            with torch.device(device_type), _default_dtype(dtype):
                made = without_weights(blank[layer.build])
            module = chain.build([layer.name], 0, CPU, dtype)[layer.name] if real else made
            if hasattr(module, "step_cache"):
                # As in the middle of a step.
                module.step_cache = {}  # pyright: ignore[reportArgumentType]  # its stub knows tensors only
            kept, notes, last = _Kept(module), [], layer is chain.layers[-1]

            def run(*watching, module=module, given=tensors, kept=kept, last=last):
                # Twice: the second micro-batch finds the weights cast already, so it keeps activations only.
                sizes = []
                with ExitStack() as stack:
                    for watch in watching:
                        stack.enter_context(watch)
                    for inputs in (given, tuple(t.clone() for t in given)):  # each micro-batch has its own
                        before, counted = kept.bytes, counting()
                        with counted if watching else nullcontext():
                            output = _loss(loss, module, inputs, targets.clone()) if last else module(*inputs)
                        sizes.append(kept.bytes - before)
                return output, sizes, counted

            draws = _Draws(len(sample), notes)
            try:
                output, sizes, counted = run(saved_tensors_hooks(kept.hold, lambda tensor: tensor), draws)
            except (DataDependentOutputException, DynamicOutputShapeException):
                raise reads_numbers(layer.name, module) from None
            except Exception as error:  # a user's code
                if "saved tensor hooks" in str(error):
                    draws = _Draws(len(sample), notes)
                    output, sizes, counted = run(kept, draws)
                elif real:
                    output, sizes, counted = run()
                    draws.seen, counted.uncounted = True, {f"layer {layer.name!r}"}
                else:
                    raise
            tensors = checked(layer.name, module, output)
            if layer is not chain.layers[-1]:
                tensors = as_tuple(converted(tensors, between_layers(precision)))
            specs = tuple(map(TensorSpec.of, tensors))
            random = draws.seen or bool(notes)
            traces.append(
                LayerTrace(layer.name, specs, sizes[1], max(0, sizes[0] - sizes[1]), random=random, work=counted)
            )
            alike[key] = traces[-1], tensors
    return traces


def reads_numbers(name: str, layer: nn.Module) -> PlanError:
    """Return the error for a layer whose shapes depend on numbers, which fake tensors do not have."""
    return PlanError(
        f"layer {name!r} ({type(layer).__name__}) reads numbers out of tensors, as .item(), .numpy(), bool(), an if or "
        "a mask as an index do. Pipelines, train.compile=true, parallel.balance=size and mode=plan have to know all "
        "shapes before there are numbers. Compute it with tensors (torch.where), or use parallel=single or ddp without "
        "these"
    )


@dataclass
class OfMicrobatch:
    """What depends on how the batch is cut.

    Attributes:
        drawing: The layers whose random numbers do; ``LOSS`` stands for the loss. They draw by themselves
            (``F.dropout``, ``nn.MultiheadAttention``, ``torch.rand``), or have dropout by sample that cannot tell the
            samples apart, because the first dimension of its input is not that of the batch.
        passing: The layers that pass on a number computed from all samples, such as an auxiliary loss.
        gathers: Whether a layer or the loss calls ``models.losses.gather``.
        given: What the loss gets from the model for twice the samples, on the meta device; None if it is not known.
        sample_dims: The dimensions of samples of each of these tensors; empty if they are not known.
    """

    drawing: list[str] = field(default_factory=list)
    passing: list[str] = field(default_factory=list)
    gathers: bool = False
    given: Tensors | None = None
    sample_dims: list[list[int]] = field(default_factory=list)


def of_microbatch(chain: Chain, sample: Batch, training: bool = True) -> OfMicrobatch:
    """Find what depends on how the batch is cut, in training or in evaluation.

    A dimension of samples doubles with their number. The search ends at a layer that cannot be computed on the meta
    device.
    """
    once = sample.to("meta")
    batches = [once, once.map(lambda tensor: torch.cat((tensor, tensor)))]
    inputs = [batch.input_tensors for batch in batches]
    known: dict[tuple, tuple[bool, bool, list[Tensors]]] = {}
    found, given = OfMicrobatch(), [*inputs]
    replicas.called = False
    for layer in chain.layers:
        last = layer is chain.layers[-1]
        key = layer.build, last, *((t.shape, t.dtype) for t in inputs[0])
        if key not in known:
            module = layer.made().train(training)
            seen, passes, notes, outputs = False, False, [], []
            of_samples = _sample_dims(*inputs)
            for batch, tensors in zip(batches, inputs, strict=True):
                notes.append([])
                samples = [tensor for tensor, dims in zip(tensors, of_samples, strict=True) if dims]
                try:
                    with torch.no_grad(), _Draws(len(batch), notes[-1], samples) as draws:
                        if last and loss_of(module) is not None:
                            _loss(chain.loss, module, tensors, batch.targets)
                        else:
                            outputs.append(module(*tensors))
                except Exception:  # a user's code
                    return found
                seen |= draws.seen
            doubled = [(name, (2 * shape[0], *shape[1:])) for name, shape in notes[0]]
            if outputs:
                each = zip(as_tuple(outputs[1]), _sample_dims(*map(as_tuple, outputs)), strict=True)
                passes = any(len(dims) != 1 and draws.computes(tensor) for tensor, dims in each)
            known[key] = seen or doubled != notes[1], passes and not replicas.called, outputs
            found.gathers |= replicas.called
            replicas.called = False
        draws_by_itself, passes, outputs = known[key]
        given, inputs = outputs or inputs, list(map(as_tuple, outputs))
        found.drawing += [layer.name] * draws_by_itself
        found.passing += [layer.name] * passes
    found.given, found.sample_dims = given[1], _sample_dims(*map(as_tuple, given))
    if inputs:
        found.drawing += [LOSS] * _loss_draws(chain, given[0], once)
        found.gathers |= replicas.called
    return found


def _sample_dims(once: Sequence[Tensor], twice: Sequence[Tensor]) -> list[list[int]]:
    """Return the dimensions of each tensor that are others for twice the samples."""
    pairs = zip(once, twice, strict=True)
    return [[i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n] for a, b in pairs]


@dataclass(frozen=True)
class Writes:
    """What operators of layers write in place.

    Attributes:
        inputs: The layers that change their inputs, and ``LOSS`` if the loss changes the model's output.
        others: The layers with an operator that fills a tensor which it does not return, as ``F.rrelu`` does. In a
            recomputation torch stops as soon as all tensors are there, which is before such an operator fills the last.
    """

    inputs: Collection[str] = ()
    others: Collection[str] = ()


def writes_of(chain: Chain, sample: Batch | None) -> Writes:
    """Find what layers write in place, on the meta device. A layer that cannot be computed there may write anything."""
    names, inputs, others = [*chain.names, LOSS], [], []
    if sample is None:
        return Writes(names, names)
    batch = sample.to("meta").map(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
    output: Tensors = batch.input_tensors
    known: dict[tuple, tuple[bool, bool, Tensors]] = {}
    at, module = 0, nn.Module()
    try:
        for layer in chain.layers:
            tensors, last = as_tuple(output), layer is chain.layers[-1]
            key = layer.build, last, *map(TensorSpec.of, tensors)
            if key not in known:
                module = layer.made()
                with Accesses(module) as accesses:
                    if last and loss_of(module) is not None:
                        output = _loss(chain.loss, module, tensors, batch.targets)
                    else:
                        output = module(*tensors)
                known[key] = bool(accesses.wrote(tensors)), accesses.fills, output
            changes, fills, output = known[key]
            inputs += [layer.name] * changes
            others += [layer.name] * fills
            at += 1
        if loss_of(module) is None:
            with Accesses(module) as accesses:
                copy_to_try(chain.loss)(output, batch.targets, None)
            inputs += [LOSS] * bool(accesses.wrote(as_tuple(output)))
    except Exception:  # a user's code
        return Writes([*inputs, *names[at:]], [*others, *names[at:]])
    return Writes(inputs, others)


def some_samples(
    tensors: Sequence[Tensor], sample_dims: Sequence[Sequence[int]], first: int, count: int, whole: int
) -> tuple[Tensor, ...]:
    """Return ``count`` samples from ``first`` on, of ``whole`` in each tensor along its ``sample_dims``."""

    def part(x: Tensor, dims: Sequence[int]) -> Tensor:
        for dim in dims:
            each = x.shape[dim] // whole  # of a sample
            x = x.narrow(dim, first * each, count * each)
        return x

    return tuple(map(part, tensors, sample_dims))


def differs_by_halves(chain: Chain, cut: OfMicrobatch, source: Source, whole: int) -> bool:
    """Return whether the loss of some samples, with made-up outputs, is not the sum of the losses of both halves.

    It is not asked if it is known to be a sum over samples, gathers, or fails, or if its outputs are unknown or large.
    ``cut`` is of ``whole`` / 2 samples, and targets are those of ``source``.
    """
    last, few = chain.names[-1], min(_ASKED, whole)
    own = loss_of(chain.skeleton([last])[last])
    if is_by_sample(own or chain.loss) or cut.given is None or cut.gathers:
        return False

    def sums(first: int, count: int) -> Tensor:
        some = some_samples(outputs, cut.sample_dims, first, count, few)
        given = some if own else (some if isinstance(cut.given, tuple) else some[0],)
        return loss(*given, targets[first : first + count], None).stack()

    with suppress(Exception), torch.no_grad():  # a user's code
        outputs = some_samples(as_tuple(cut.given), cut.sample_dims, 0, few, whole)
        if sum(tensor.numel() for tensor in outputs) <= MOST_OUTPUTS:
            generator = torch.Generator().manual_seed(0)
            outputs = tuple(torch.rand(t.shape, generator=generator).to(t.dtype) for t in outputs)
            rows = np.linspace(0, len(source) - 1, few).astype(np.int64)
            targets = converted(Batch(*source.read(rows, 0)).targets, torch.float32)
            loss: Any = loss_of(chain.build([last], 0, CPU)[last]) if own else copy_to_try(chain.loss)
            both = sums(0, few // 2) + sums(few // 2, few // 2)
            return not torch.allclose(both, sums(0, few), rtol=_SAME, equal_nan=True)
    return False


def _loss_draws(chain: Chain, output: Tensors, batch: Batch) -> bool:
    with torch.no_grad(), _Draws(len(batch), []) as draws, suppress(Exception):  # a user's code
        copy_to_try(chain.loss)(output, batch.targets, None)
    return draws.seen


def stage_borders(plan: Plan, chain: Chain, sample: Batch) -> list[tuple[TensorSpec, ...]]:
    """Infer the tensors of one micro-batch that stages 0, 1, ... receive, and finally the loss."""
    outputs = {t.name: t.outputs for t in trace(chain, sample, plan.precision, plan.device_type)}
    received = tuple(map(TensorSpec.of, sample.input_tensors))
    *sent, loss = (outputs[stage.layers[-1]] for stage in plan.stages)
    if plan.sequence:  # each rank has a part of dimension 1
        sent = [tuple(spec.divided(plan.tp) for spec in specs) for specs in sent]
    return [received, *sent, loss]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    # Module.to() cannot convert fake parameters, so they are made in the right dtype.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _loss(loss: Loss, module: nn.Module, tensors: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Return the loss of the last layer, whose output never leaves the stage."""
    if (head_loss := loss_of(module)) is not None:
        return head_loss(*tensors, targets, None).loss
    return loss(module(*tensors), targets, None).loss


class Watch(TorchDispatchMode):
    """Calls ``note`` with each operator and its arguments before it runs, but for those that take functions."""

    supports_higher_order_operators = True
    compiles = False  # whether there was an operator that takes functions, such as torch.cond

    def __exit__(self, kind, error, trace) -> None:
        super().__exit__(kind, error, trace)
        if (error is not None or self.compiles) and "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # it would go on to refuse functions such as torch.cond, which it met under this mode

    @abstractmethod
    def note(self, operator: Any, args: tuple, kwargs: dict) -> None:
        """Note an operator."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if isinstance(operator, OpOverload):
            self.note(operator, args, kwargs or {})
        else:
            self.compiles = True
        return operator(*args, **(kwargs or {}))


class Accesses(Watch):
    """Records which tensors of a module are read and written by operators, also on the meta device.

    ``data_dependent`` is whether a result or a shape depended on numbers, as that of ``.item()`` does. ``others``
    are the parameters that were used and are none of the module's. ``fills`` is whether an operator wrote into a tensor
    that it does not return.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.data_dependent = self.fills = False
        self.others: list[nn.Parameter] = []
        self._module, self._before = module, _tensors_of(module)
        self._parameters = {id(parameter) for parameter in module.parameters()}
        self._read: set[int] = set()
        self._written: set[int] = set()

    def wrote(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the storages of those tensors that were changed in place."""
        return [storage for tensor in tensors if (storage := _storage_of(tensor)) in self._written]

    def changed(self) -> str | None:
        """Return the name of a tensor that was changed and that a later step, or an evaluation, may read.

        A tensor that is neither saved nor read is ignored, because it carries nothing from step to step.
        """
        saved, now = self._module.state_dict().keys(), _tensors_of(self._module)
        for name, storage in self._before.items():
            if storage in self._written or now.get(name) != storage:
                if name in saved or storage in self._read:
                    return name
        return None

    def note(self, operator: Any, args: tuple, kwargs: dict) -> None:
        """See ``Watch``."""
        schema = operator._schema
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operator.tags):
            self.data_dependent |= not _indexed_by_numbers(operator, args)
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        for argument in schema.arguments:
            value = given.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, Tensor):
                    if isinstance(tensor, nn.Parameter) and id(tensor) not in self._parameters:
                        self.others.append(tensor)
                    self._note(schema, argument, _storage_of(tensor), given)

    def _note(self, schema, argument, storage: int, given: dict) -> None:
        alias = argument.alias_info
        if argument.name in ("running_mean", "running_var") and (given.get("training") or given.get("train")):
            self._written.add(storage)  # the schema does not say so
        elif alias is None:
            self._read.add(storage)
        elif alias.is_write:
            self._written.add(storage)
            self.fills |= all(result.alias_info is None for result in schema.returns)
            if not argument.is_out and schema.name not in ("aten::copy_", "aten::fill_", "aten::zero_"):
                self._read.add(storage)


def _indexed_by_numbers(operator: Any, args: tuple) -> bool:
    """Return whether an operator is ``x[indices]``, whose shape is that of the indices, and not ``x[mask]``."""
    if operator is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _tensors_of(module: nn.Module) -> dict[str, int]:
    """Return the storages of a module's parameters and buffers by name, without this project's BatchNorm statistics."""
    statistics = {id(b) for norm in module.modules() if isinstance(norm, StepBatchNorm) for b in norm.buffers()}
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.untyped_storage()._cdata for name, tensor in tensors.items() if id(tensor) not in statistics}


class _Draws(Watch):
    """Detects operators that draw random numbers, and what is computed from ``inputs``.

    Dropout by sample draws none here and is added to ``notes``.
    """

    def __init__(self, samples: int, notes: list, inputs: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.seen = False
        self._computed = {id(tensor): tensor for tensor in inputs}  # which keeps them, and thus their ids
        self._computing = computing(Samples(samples, notes=notes))

    def __enter__(self):
        self._computing.__enter__()
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        self._computing.__exit__(*exception)

    def note(self, operator: Any, args: tuple, kwargs: dict) -> None:
        """See ``Watch``."""
        if torch.Tag.nondeterministic_seeded in operator.tags:
            arguments = operator._schema.arguments
            given = {a.name: a.default_value for a in arguments}
            given |= dict(zip(given, args, strict=False)) | kwargs
            # Attention has this tag because it may apply dropout.
            self.seen |= given.get("dropout_p", given.get("p")) != 0.0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if self._computed and ".new_" not in str(operator) and "_like." not in str(operator):  # these use a shape only
            if any(map(self.computes, tree_leaves((args, kwargs)))):
                self._computed |= {id(t): t for t in tree_leaves(result) if isinstance(t, Tensor)}
        return result

    def computes(self, tensor: Any) -> bool:
        """Return whether a tensor is computed from the inputs."""
        return id(tensor) in self._computed


class _Kept(Watch):
    """Adds up the bytes of the storages that autograd saves, each once, without those of parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.bytes = 0
        self._alive: list[Tensor] = [*module.parameters()]
        self._known = {p.untyped_storage()._cdata for p in module.parameters()}

    def note(self, operator: Any, args: tuple, kwargs: dict) -> None:
        """See ``Watch``: what operators compute with, where torch does not say what it saves."""
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self.hold(tensor)

    def hold(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and (storage := tensor.untyped_storage())._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(tensor)  # otherwise its address could be reused
            self.bytes += storage.nbytes()
        return tensor
