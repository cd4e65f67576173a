"""What layers and the loss do in a forward that depends on the layout, seen by running them without memory.

Each kind of layer computes a micro-batch, and then twice its samples, on the meta device; one that torch cannot compute
there computes numbers on the CPU.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.errors import PlanError
from data.dataset import Batch, Source
from models.batchnorm import StepBatchNorm
from models.chain import CPU, LOSS, Chain, Tensors, as_tuple, checked, converted
from models.losses import Sums, copy_to_try, is_by_sample, loss_of, replicas
from models.seeds import Samples, computing, seeded

MOST_OUTPUTS = 10**7  # elements of the model's output above which a loss is not tried on made-up ones
REENTRANT = (
    "calls torch.utils.checkpoint with use_reentrant=True, which DistributedDataParallel does not support: set "
    "use_reentrant=False, or use parallel=fsdp"
)
_ASKED = 8  # samples for which a loss is asked
_SAME = 1e-3  # relative difference of losses that may be rounding
_aten = torch.ops.aten
# Operations whose arguments must all have one dtype; on the meta device they accept any.
_PRODUCTS = {
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution,
    _aten.native_layer_norm, _aten.native_group_norm, _aten.native_batch_norm,
}  # fmt: skip


@dataclass
class Facts:
    """What is seen of a layer, or of the loss.

    Attributes:
        name: The layer; ``LOSS`` for the loss.
        kind: Its class.
        given: Its inputs for the micro-batch, and for twice the samples unless they are unknown.
        outputs: Its results for each of them, on the meta device; empty if it fails.
        error: The error in which it ends without memory, or with numbers, too, if there are no ``outputs``.
        watched: Whether the facts below are known.
        draws: Whether its random numbers depend on how the batch is cut. It draws by itself (``F.dropout``,
            ``nn.MultiheadAttention``, ``torch.rand``), or has dropout by sample that cannot tell the samples apart,
            because the first dimension of its input is not that of the batch.
        random: Whether it draws random numbers.
        passes: Whether it passes on a number computed from all samples, such as an auxiliary loss.
        gathers: Whether it calls ``models.losses.gather``.
        writes: Whether it changes its inputs in place.
        aliases: Whether an input that it changes has the memory of another.
        fills: Whether an operator fills a tensor which it does not return, as that of ``F.rrelu`` does. In a
            recomputation torch stops as soon as all tensors are there, which is before such an operator fills the last.
        spoils: Whether it changes a tensor in place that its backward needs, which torch does not notice in a
            recomputation.
        reads_numbers: Whether a result or a shape depends on numbers.
        stale: Whether it uses a parameter that a run would not train, because it replaces those of modules.
        reentrant: Whether it calls ``torch.utils.checkpoint`` with ``use_reentrant=True``.
        changes: A tensor of the layer's state that each forward changes; None if there is none.
        norms: The calls of each BatchNorm that updates its statistics.
    """

    name: str
    kind: str
    given: Sequence[tuple[Tensor, ...]]
    outputs: list[Any] = field(default_factory=list)
    error: Exception | None = None
    watched: bool = True
    draws: bool = False
    random: bool = False
    passes: bool = False
    gathers: bool = False
    writes: bool = False
    aliases: bool = False
    fills: bool = False
    spoils: bool = False
    reads_numbers: bool = False
    stale: bool = False
    reentrant: bool = False
    changes: str | None = None
    norms: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Examination:
    """The facts of a chain.

    Attributes:
        names: Those of the layers, and ``LOSS``.
        layers: Their facts, up to the first layer that cannot be computed.
        losses: Those of the last layer's own loss, if it has one, and of the chain's.
    """

    names: Sequence[str]
    layers: list[Facts] = field(default_factory=list)
    losses: list[Facts] = field(default_factory=list)

    def which(self, fact: str) -> list[str]:
        """Return the names of the layers of which a fact is true; ``LOSS`` stands for the loss."""
        # If the last layer computes the loss, the chain's is not called.
        used = [*self.layers, *self.losses[:1]]
        return list(dict.fromkeys(facts.name for facts in used if getattr(facts, fact)))

    def may(self, fact: str) -> set[str]:
        """Return the names of the layers of which a fact is true or unknown; ``LOSS`` stands for the loss."""
        found = [*self.layers, *self.losses]
        known = {facts.name for facts in found} - {facts.name for facts in found if not facts.watched}
        return {*self.names} - known | {*self.which(fact)}

    @property
    def given(self) -> Sequence[tuple[Tensor, ...]]:
        """What the loss gets from the model, for the micro-batch and for twice the samples; empty if unknown."""
        return self.losses[0].given if self.losses else ()

    @property
    def sample_dims(self) -> list[list[int]]:
        """The dimensions of samples of each of these tensors, which double with the samples; empty if unknown."""
        return _sample_dims(*self.given) if len(self.given) == 2 else []


def examine(chain: Chain, sample: Batch, samples: Sequence[Batch] = (), training: bool = True) -> Examination:
    """Pass a micro-batch, and twice its samples, through the layers and the loss, in training or in evaluation.

    ``samples`` are those that are known, in whose range integer inputs lie. The examination ends at a layer that cannot
    be computed.
    """
    with seeded(0):
        return _Examiner(chain, sample, samples, training).examine()


ERRORS = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, IndexError)  # of layers and losses
Given = Sequence[tuple[Tensor, ...]]
Call = Callable[[nn.Module, tuple[Tensor, ...], Batch], Any]


class _Examiner:
    """Calls layers and losses, and notes what they do."""

    def __init__(self, chain: Chain, sample: Batch, samples: Sequence[Batch], training: bool) -> None:
        batch = sample.map(lambda tensor: converted(tensor, torch.float32))
        self.chain, self.training = chain, training
        self.batches = [batch, batch.map(lambda tensor: torch.cat((tensor, tensor)))]
        self.meta = [each.to("meta") for each in self.batches]
        self.inputs = [each.input_tensors for each in self.meta]
        self.kinds = RealKinds(self.meta[0], samples) if samples else nullcontext()
        self.replaced: set[nn.Parameter] = set()

    def examine(self) -> Examination:
        """See the function."""
        chain, known, given = self.chain, {}, self.inputs
        found = Examination([*chain.names, LOSS])
        for layer in chain.layers:
            kinds = [(t.shape, t.dtype, t.requires_grad, t.stride()) for t in given[0]]
            key = layer.build, layer is chain.layers[-1], *kinds
            if key not in known:
                module = layer.made() if self.training else layer.made().eval()
                self.replaced |= _replace_parameters(module)
                known[key] = self._observe(layer.name, module, partial(_output, layer.name), given)
            found.layers.append(replace(known[key], name=layer.name))
            if not known[key].outputs:
                return found
            before, given = given, [as_tuple(output) for output in known[key].outputs]
        several, loss = isinstance(found.layers[-1].outputs[0], tuple), copy_to_try(chain.loss)
        calls: dict[str, tuple[Call, nn.Module, Given]] = {
            LOSS: (lambda _, x, batch: loss(x if several else x[0], batch.targets, None), nn.Module(), given)
        }
        if loss_of(module) is not None:
            calls = {layer.name: (lambda own, x, batch: own.loss(*x, batch.targets, None), module, before)} | calls
        found.losses += [self._observe(name, module, call, x, loss=True) for name, (call, module, x) in calls.items()]
        return found

    def _observe(self, name: str, module: nn.Module, call: Call, given: Given, loss: bool = False) -> Facts:
        """Observe a layer or a loss on the meta device, or with numbers if torch cannot compute it there.

        A loss may read numbers, as no shape depends on it.
        """
        facts = self._seen(name, module, call, given, self.meta)
        if facts.error is None or (facts.reads_numbers and not loss) or getattr(self.kinds, "refused", False):
            return facts
        error, first = facts.error, given is self.inputs
        numbers = [batch.input_tensors if first else made_up(x) for x, batch in zip(given, self.batches, strict=False)]
        for watched in (True, False):  # torch does not let some operators be watched
            if name != LOSS:
                module = self.chain.build([name], 0, CPU)[name]
            seen = self._seen(name, module, call, numbers, self.batches, watched)
            if seen.error is None:
                outputs = [o if isinstance(o, Sums) else made_up(o, "meta") for o in seen.outputs]
                seen.reads_numbers |= facts.reads_numbers
                return replace(seen, given=given, outputs=outputs, stale=facts.stale, error=error)
            facts.error = seen.error
        return facts

    def _seen(
        self, name: str, module: nn.Module, call: Call, given: Given, batches: Sequence[Batch], watched: bool = True
    ) -> Facts:
        """Call a layer or a loss with each of what it is given, and note what it does the first time and the second."""
        facts, calls = Facts(name, type(module).__name__, given), _calls_of_batchnorm(name, module)
        dims = _sample_dims(*given) if len(given) == 2 else []
        replicas.called, runs = False, []
        for tensors, batch in zip(given, batches, strict=False):
            accesses, error, notes = Accesses(module), None, []
            draws = Draws([tensor for tensor, of in zip(tensors, dims, strict=False) if of])
            dropout = computing(Samples(len(batch), notes=notes))  # dropout by sample draws nothing, and is noted
            try:
                with torch.set_grad_enabled(self.training), ExitStack() as modes:
                    for mode in (self.kinds, dropout, draws, accesses) if watched else ():
                        modes.enter_context(mode)
                    output = call(module, tensors, batch)
            except Exception as failure:  # a user's code
                error = failure
            if not runs:
                facts.error, facts.watched = error, watched and error is None
                facts.reads_numbers = accesses.data_dependent or _needs_numbers(error)
                facts.stale = any(map(self._is_stale, accesses.others))
                written = accesses.wrote(tensors)
                facts.writes, facts.aliases = bool(written), len(written) > len(set(written))
                facts.fills, facts.norms = accesses.fills, dict(calls)
            if error is not None:
                break
            others, changed = self.training and accesses.wrote_others(), accesses.changed()
            if not runs and (others or changed is not None):
                with computing(Samples(len(batch), notes=[])), Accesses(module) as again:
                    following = call(module, tuple(tensor.clone() for tensor in tensors), batch)
                facts.changes = changed and again.changed()  # or has a cache been filled?
                facts.spoils = others and _is_spoilt(following, [*tensors, *module.parameters()])
            facts.outputs.append(output)
            starts = {tensor.grad_fn for tensor in tensors}
            own = (n for n in backward_nodes(tree_leaves(output), starts.__contains__) if n not in starts)
            facts.reentrant |= any(node.name() == "CheckpointFunctionBackward" for node in own)
            facts.draws |= draws.seen
            facts.random |= draws.seen or bool(notes)
            runs.append((draws, notes))
        facts.gathers = replicas.called
        if len(runs) == 2:
            (_, once), (draws, twice) = runs
            facts.draws |= [(path, (2 * shape[0], *shape[1:])) for path, shape in once] != twice
            if not isinstance(facts.outputs[0], Sums) and not facts.gathers:
                outputs = [as_tuple(output) for output in facts.outputs]
                each = zip(outputs[1], _sample_dims(*outputs), strict=False)
                facts.passes = any(len(of) != 1 and draws.computes(tensor) for tensor, of in each)
        return facts

    def _is_stale(self, parameter: nn.Parameter) -> bool:
        """Return whether a run would compute with this parameter and train another one in its place."""
        return parameter in self.replaced or (parameter.requires_grad and parameter.device.type != "meta")


def _output(name: str, module: nn.Module, tensors: tuple[Tensor, ...], _: Batch) -> Tensors:
    output = module(*tensors)
    checked(name, module, output)
    return output


def backward_nodes(outputs: Iterable[Any], ends: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the nodes of the backward from some tensors, each once, and none behind those of which ``ends`` is true."""
    seen, nodes = set(), [getattr(output, "grad_fn", None) for output in outputs]
    while nodes:
        if (node := nodes.pop()) is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [] if ends(node) else [following for following, _ in node.next_functions]


def _is_spoilt(output: Any, inputs: Sequence[Tensor]) -> bool:
    """Return whether a backward from ``output`` ends in the error for tensors that were changed in place."""
    ends, starts = ([t for t in tree_leaves(some) if t.requires_grad] for some in (output, inputs))
    try:
        torch.autograd.grad(ends, starts, [torch.ones_like(t) for t in ends], retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        return "inplace operation" in str(error)
    return False


def _needs_numbers(error: Exception | None) -> bool:
    """Return whether a layer failed at ``.tolist()``, ``.numpy()``, ``.cpu()`` or the like, without memory."""
    words = ("meta tensor", "meta device")
    return isinstance(error, (NotImplementedError, TypeError)) and any(word in str(error) for word in words)


def made_up(tensors: Any, device: str = "cpu") -> Any:
    """Return numbers from 0 to 1 in the shapes and dtypes of tensors. None is a leaf, which cannot change in place."""

    def drawn(like: Tensor) -> Tensor:
        numbers = torch.rand(like.shape, device=device).to(like.dtype)
        return numbers.requires_grad_().clone() if like.requires_grad else numbers

    with seeded(0):
        return tuple(map(drawn, tensors)) if isinstance(tensors, tuple) else drawn(tensors)


def _replace_parameters(layer: nn.Module) -> set[nn.Parameter]:
    """Replace the parameters of a layer on the meta device, as a run does. Returns the first ones."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # several names may share a parameter
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                made[parameter] = nn.Parameter(parameter.detach(), parameter.requires_grad)
            setattr(module, name, made[parameter])
    return set(made)


def _calls_of_batchnorm(name: str, layer: nn.Module) -> Counter[str]:
    """Return the calls of each BatchNorm in a layer that updates its statistics; they are counted from now on."""
    calls: Counter[str] = Counter()
    for path, norm in layer.named_modules(prefix=name):
        if isinstance(norm, StepBatchNorm) and norm.training:
            norm.register_forward_pre_hook(lambda *_, path=path: calls.update([path]))
    return calls


def _sample_dims(once: Sequence[Tensor], twice: Sequence[Tensor]) -> list[list[int]]:
    """Return the dimensions of each tensor that are others for twice the samples."""
    pairs = zip(once, twice, strict=False)
    return [[i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=False)) if m != n] for a, b in pairs]


def reads_numbers(name: str, kind: str) -> PlanError:
    """Return the error for a layer whose shapes depend on numbers, which fake tensors do not have."""
    return PlanError(
        f"layer {name!r} ({kind}) reads numbers out of tensors, as .item(), .numpy(), bool(), an if or "
        "a mask as an index do. Pipelines, train.compile=true, parallel.balance=size and mode=plan have to know all "
        "shapes before there are numbers. Compute it with tensors (torch.where), or use parallel=single or ddp without "
        "these"
    )


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


def differs_by_halves(chain: Chain, found: Examination, source: Source, whole: int) -> bool:
    """Return whether the loss of some samples, with made-up outputs, is not the sum of the losses of both halves.

    It is not asked if it is known to be a sum over samples, gathers, or fails, or if its outputs are unknown or large.
    ``found`` is of ``whole`` / 2 samples, and targets are those of ``source``.
    """
    last, few = chain.names[-1], min(_ASKED, whole)
    own = loss_of(chain.skeleton([last])[last])
    if is_by_sample(own or chain.loss) or not found.sample_dims or found.which("gathers"):
        return False
    several = own is not None or isinstance(found.layers[-1].outputs[0], tuple)

    def sums(first: int, count: int) -> Tensor:
        some = some_samples(outputs, found.sample_dims, first, count, few)
        return loss(*(some if own else (some if several else some[0],)), targets[first : first + count], None).stack()

    with suppress(Exception), torch.no_grad():  # a user's code
        outputs = some_samples(found.given[1], found.sample_dims, 0, few, whole)
        if sum(tensor.numel() for tensor in outputs) <= MOST_OUTPUTS:
            outputs = made_up(outputs)
            rows = np.linspace(0, len(source) - 1, few).astype(np.int64)
            targets = converted(Batch(*source.read(rows, 0)).targets, torch.float32)
            loss: Any = loss_of(chain.build([last], 0, CPU)[last]) if own else copy_to_try(chain.loss)
            both = sums(0, few // 2) + sums(few // 2, few // 2)
            return not torch.allclose(both, sums(0, few), rtol=_SAME, equal_nan=True)
    return False


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

    def wrote_others(self) -> bool:
        """Return whether tensors were changed in place that are none of the module's."""
        return not self._written <= {*self._before.values()}

    def changed(self) -> str | None:
        """Return the name of a tensor that was changed and that a later step, or an evaluation, may read.

        A tensor that is neither saved nor read is ignored, because it carries nothing from step to step.
        """
        saved, now = self._module.state_dict().keys(), _tensors_of(self._module)
        changed = ((n, s) for n, s in self._before.items() if s in self._written or now.get(n) != s)
        return next((name for name, storage in changed if name in saved or storage in self._read), None)

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
    masks = (torch.bool, torch.uint8)
    return operator is _aten.index.Tensor and all(index is None or index.dtype not in masks for index in args[1])


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _tensors_of(module: nn.Module) -> dict[str, int]:
    """Return the storages of a module's parameters and buffers by name, without this project's BatchNorm statistics."""
    statistics = {id(b) for norm in module.modules() if isinstance(norm, StepBatchNorm) for b in norm.buffers()}
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.untyped_storage()._cdata for name, tensor in tensors.items() if id(tensor) not in statistics}


class Draws(Watch):
    """Detects operators that draw random numbers, and what is computed from ``inputs``."""

    def __init__(self, inputs: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.seen = False
        self._computed = {id(tensor): tensor for tensor in inputs}  # which keeps them, and thus their ids

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


class RealKinds(Watch):
    """Refuses errors that the meta device does not: integers in a product with weights, tokens beyond an embedding."""

    def __init__(self, meta: Batch, samples: Sequence[Batch]) -> None:
        """Note the range of each integer input."""
        super().__init__()
        columns = zip(*(batch.input_tensors for batch in samples), strict=True)
        self.refused = False
        self._range = {id(tensor): _range(column) for tensor, column in zip(meta.input_tensors, columns, strict=True)}

    def note(self, operator: Any, args: tuple, kwargs: dict) -> None:
        """Check an operation."""
        operation = operator.overloadpacket
        if operation in _PRODUCTS:
            dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor)}
            whole = [str(dtype).removeprefix("torch.") for dtype in dtypes if not dtype.is_floating_point]
            if whole and len(dtypes) > len(whole):
                self.refused = True
                raise TypeError(
                    f"it computes with floating-point numbers and gets {whole[0]}: give inputs.float(), or write the "
                    "file of data=arrays as float32"
                )
        elif operation is _aten.embedding and (limits := self._range.get(id(args[1]))) is not None:
            rows = len(args[0])
            if not 0 <= limits[0] <= limits[1] < rows:
                self.refused = True
                raise IndexError(f"it embeds 0 to {rows - 1} and gets whole numbers from {limits[0]} to {limits[1]}")


def _range(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    if any(tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.numel() == 0 for tensor in tensors):
        return None
    return min(int(tensor.min()) for tensor in tensors), max(int(tensor.max()) for tensor in tensors)
