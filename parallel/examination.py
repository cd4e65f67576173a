"""The facts of layers and of the loss that a layout depends on, found by running the layers without memory.

Each kind of layer computes a micro-batch, and then twice as many samples, on the meta device. A layer that torch cannot
compute there computes numbers on the CPU. The sentence for each fact is in ``parallel.supported``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from common.errors import PlanError
from data.dataset import Batch, mapped
from models.auxiliary import Collected, collecting
from models.batchnorm import StepBatchNorm
from models.chain import CPU, LOSS, Chain, LayerSpec, Tensors, as_tuple, checked, converted, is_within
from models.losses import Sums, copy_to_try, is_by_sample, loss_of, replicas
from models.seeds import Samples, computing, seeded
from parallel.watching import Effects, Refused

MOST_OUTPUTS = 10**7  # elements of the model's output above which a loss is not tried on made-up outputs
_ASKED = 8  # number of samples on which a loss is tried
_SOME = 64  # number of samples that an examination keeps
_SAME = 1e-3  # relative difference of losses that may come from rounding


@dataclass
class Facts:
    """The facts of a layer, or of the loss.

    Attributes:
        name: The name of the layer; ``LOSS`` for the loss.
        kind: The class of the layer.
        given: The inputs for the micro-batch, and for twice the samples unless they are unknown.
        outputs: The results for each of the inputs, on the meta device; empty if the layer fails.
        error: The error that the layer raises without memory. If ``outputs`` is empty, the layer also fails with
            numbers.
        watched: Whether the facts below are known.
        draws: Whether the layer's random numbers depend on how the batch is cut. The layer draws by itself
            (``F.dropout``, ``nn.MultiheadAttention``, ``torch.rand``), or has dropout by sample that cannot tell the
            samples apart, because the first dimension of the dropout's input is not the batch dimension.
        random: Whether the layer draws random numbers.
        passes: Whether the layer passes on a number computed from all samples, such as an auxiliary loss. For the loss:
            whether the loss of some samples, with made-up outputs, differs from the sum of the losses of both halves.
            The loss is not tried if it is known to be a sum over samples, draws, gathers, or fails, or if its inputs
            are unknown or large.
        gathers: Whether the layer calls ``models.losses.gather``.
        writes: Whether the layer changes its inputs in place.
        aliases: Whether the layer changes an input in place that shares its memory with another input.
        fills: Whether an operator fills a tensor that the operator does not return, as the operator of ``F.rrelu``
            does. torch's recomputation stops as soon as all tensors exist, before this operator has filled the last
            one.
        spoils: Whether the layer changes a tensor in place that its backward needs. torch does not notice this in a
            recomputation.
        reads_numbers: Whether a result or a shape depends on numbers.
        stale: Whether the layer uses a parameter that a run would not train, because a run replaces the parameters of
            modules.
        makes: The names of the parameters and buffers of checkpoints that the forward has added to the layer.
        reentrant: Whether the layer calls ``torch.utils.checkpoint`` with ``use_reentrant=True``.
        changes: The names of the tensors in the layer's state that each forward changes.
        norms: The number of calls that update the statistics of each BatchNorm, by the BatchNorm's name.
        auxiliary: Whether the layer has an auxiliary loss (``models.auxiliary``).
        sums: The number of sums that the layer attaches, by their key.
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
    makes: Sequence[str] = ()
    reentrant: bool = False
    changes: Sequence[str] = ()
    norms: Mapping[str, int] = field(default_factory=dict)
    auxiliary: bool = False
    sums: Mapping[str, int] = field(default_factory=dict)

    def of(self, name: str) -> Facts:
        """Return the facts of a layer that differs from this one only in its name."""
        sums = {
            name + key.removeprefix(self.name) if is_within(f"{key}.", [self.name]) else key: n
            for key, n in self.sums.items()
        }
        return replace(self, name=name, sums=sums)


@dataclass
class Examination:
    """The facts of a chain.

    Attributes:
        names: The names of the layers, and ``LOSS``.
        layers: The facts of the layers, up to the first one that cannot be computed.
        loss: The facts of the loss: the last layer's method if that layer computes the loss, otherwise the chain's
            loss. None if a layer cannot be computed, or reads numbers.
        sample: Some samples; None if nothing was examined.
        needs_others: A sentence about a layer, or the loss, that needs other positions of a sequence than a process has
            (``parallel.mixing``); empty if there is none, None if it is unknown.
        heads: The numbers of heads of queries, and of keys and values, in layers that call ``models.attention.attend``.
            Filled together with ``needs_others``.
        mixes_experts: A sentence about experts whose output is not a weighted sum (``parallel.axes.experts``); empty if
            there are none, None if it is unknown.
    """

    names: Sequence[str]
    sample: Batch | None = None
    layers: list[Facts] = field(default_factory=list)
    loss: Facts | None = None
    needs_others: str | None = None
    heads: set[tuple[str, int, int]] = field(default_factory=set)
    mixes_experts: str | None = None

    def which(self, fact: str) -> list[str]:
        """Return the names of the layers for which a fact is true; ``LOSS`` stands for the loss."""
        return list(dict.fromkeys(facts.name for facts in self._found if getattr(facts, fact)))

    def may(self, fact: str) -> set[str]:
        """Return the names of the layers for which a fact is true or unknown; ``LOSS`` stands for the loss."""
        seen = [*self.names[: len(self.layers)], *[LOSS] * (self.loss is not None)]
        known = {*seen} - {facts.name for facts in self._found if not facts.watched}
        return {*self.names} - known | {*self.which(fact)}

    @property
    def _found(self) -> list[Facts]:
        return self.layers if self.loss is None else [*self.layers, self.loss]

    def for_plan(self) -> dict[str, Any]:
        """Return the fields ``facts``, ``sample_dims`` and ``auxiliary`` of a plan."""
        facts = {fact: sorted(self.may(fact)) for fact in ("writes", "fills", "random")}
        facts |= {fact: self.which(fact) for fact in ("draws", "passes", "auxiliary")}
        facts["changes"] = [f"{of.name}.{tensor}" for of in self.layers for tensor in of.changes]
        sums = {key: n for of in self._found for key, n in of.sums.items()}
        return {"facts": facts, "sample_dims": self.sample_dims, "auxiliary": sums}

    @property
    def sample_dims(self) -> list[list[int]]:
        """The dimensions of samples of each tensor that the loss gets from the model; empty if unknown."""
        return [] if self.loss is None else _sample_dims(self.loss.given)


def examine(
    chain: Chain,
    sample: Batch,
    samples: Sequence[Batch] = (),
    training: bool = True,
) -> Examination:
    """Pass a micro-batch, and then twice as many samples, through the layers and the loss.

    The examination ends at a layer that cannot be computed, and before the loss if a layer reads numbers, because
    shapes may then be others in a run.

    Args:
        chain: The model.
        sample: A micro-batch.
        samples: Known samples. They give the range of integer inputs, and the targets of the first samples test whether
            the loss is a sum over samples.
        training: Whether the mode is training, not evaluation.
    """
    with seeded(0):
        return _Examiner(chain, sample, samples, training).examine()


ERRORS = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, IndexError)  # of layers and losses
Given = Sequence[tuple[Tensor, ...]]
Call = Callable[[nn.Module, tuple[Tensor, ...], Batch], Any]


class _Examiner:
    """Calls layers and losses, and records the facts."""

    def __init__(self, chain: Chain, sample: Batch, samples: Sequence[Batch], training: bool) -> None:
        batch = sample.map(lambda tensor: converted(tensor, torch.float32))
        self.chain, self.training = chain, training
        self.batches = [batch, batch.map(lambda tensor: torch.cat((tensor, tensor)))]
        self.meta = [each.to("meta") for each in self.batches]
        self.inputs = [each.input_tensors for each in self.meta]
        columns = zip(*(batch.input_tensors for batch in samples), strict=True)
        ranges = zip(self.inputs[0], map(_range, columns), strict=False)
        self.ranges = {id(tensor): limits for tensor, limits in ranges if limits is not None}
        self.replaced: set[nn.Parameter] = set()
        self.targets = samples[0].targets if samples else None
        self.some = samples[0].map(lambda x: x[:: 1 + len(x) // _SOME]) if samples else batch

    def examine(self) -> Examination:
        """See ``examine``."""
        chain, given, before, module = self.chain, self.inputs, self.inputs, nn.Module()
        found = Examination([*chain.names, LOSS], self.some)

        def observed(layer: LayerSpec, _: tuple) -> tuple[Facts, tuple]:
            nonlocal module
            module = layer.made() if self.training else layer.made().eval()
            self.replaced |= _replace_parameters(module)
            facts = self._observe(layer.name, module, partial(_output, layer.name), given)
            return facts, as_tuple(facts.outputs[0]) if facts.outputs else ()

        for name, facts in zip(chain.names, chain.walk(given[0], observed), strict=False):
            found.layers.append(facts.of(name))
            if not facts.outputs:
                return found
            before, given = given, [as_tuple(output) for output in facts.outputs]
        if found.which("reads_numbers"):
            return found
        several, loss, own = isinstance(found.layers[-1].outputs[0], tuple), copy_to_try(chain.loss), loss_of(module)

        def call(module: Any, x: tuple[Tensor, ...], batch: Batch) -> Sums:
            if own is not None:
                return module.loss(*x, batch.targets, None)
            return loss(x if several else x[0], batch.targets, None)

        name, module, given = (LOSS, nn.Module(), given) if own is None else (chain.names[-1], module, before)
        facts = found.loss = self._observe(name, module, call, given, loss=True)
        if self.targets is not None and not (facts.draws or found.which("gathers") or is_by_sample(own or chain.loss)):
            facts.passes = self._differs_by_halves(facts, call, module, self.targets)
        return found

    def _observe(self, name: str, module: nn.Module, call: Call, given: Given, loss: bool = False) -> Facts:
        """Observe a layer or a loss on the meta device, or with numbers if torch cannot compute it there.

        A loss may read numbers, because no shape depends on the loss.
        """
        facts = self._seen(name, module, call, given, self.meta)
        if facts.error is None or isinstance(facts.error, Refused):
            return facts
        error, first = facts.error, given is self.inputs
        numbers = [batch.input_tensors if first else made_up(x) for x, batch in zip(given, self.batches, strict=False)]
        for watched in (True, False):  # torch does not allow some operators to be watched
            if name != LOSS:
                module = self.chain.build([name], 0, CPU)[name]
            seen = self._seen(name, module, call, numbers, self.batches, watched)
            if seen.error is None:
                outputs = [o if isinstance(o, Sums) else made_up(o, "meta") for o in seen.outputs]
                seen.reads_numbers |= facts.reads_numbers
                seen.watched &= loss or not seen.reads_numbers  # other numbers may lead to other operators
                return replace(seen, given=given, outputs=outputs, stale=facts.stale, error=error)
            facts.error = seen.error
        return facts

    def _seen(
        self, name: str, module: nn.Module, call: Call, given: Given, batches: Sequence[Batch], watched: bool = True
    ) -> Facts:
        """Call a layer or a loss and record the facts; then call it with twice the samples, and compare."""
        facts, norms = Facts(name, type(module).__name__, given), _calls_of_batchnorm(name, module)
        (tensors, batch), *twice = zip(given, batches, strict=False)
        followed = [x for x, of in zip(tensors, _sample_dims(given), strict=False) if of]
        effects, saved = Effects(module, followed, self.ranges), module.state_dict().keys()
        replicas.called, notes = False, []
        try:
            with collecting(Collected()) as collected:
                output = self._called(call, module, tensors, batch, notes, effects if watched else nullcontext())
            facts.auxiliary = bool(collected.losses)
            facts.sums = {key: len(sums) for key, sums in collected.sums.items()}
        except Exception as error:  # a user's code
            facts.error = error
        facts.watched = watched and facts.error is None
        facts.reads_numbers = effects.data_dependent or _needs_numbers(facts.error)
        facts.stale = any(map(self._is_stale, effects.others))
        written = effects.wrote(tensors)
        facts.writes, facts.aliases = bool(written), len(written) > len(set(written))
        facts.fills, facts.norms, facts.gathers = effects.fills, dict(norms), replicas.called
        facts.draws, facts.random = effects.draws, effects.draws or bool(notes)
        facts.makes = sorted(module.state_dict().keys() - saved)
        if facts.error is not None:
            return facts
        others, changed = self.training and effects.wrote_others(), effects.changed()
        if others or changed:
            again = Effects(module)
            following = self._called(call, module, tuple(tensor.clone() for tensor in tensors), batch, [], again)
            facts.changes = again.changed() if changed else ()  # or has a cache been filled?
            facts.spoils = others and _is_spoilt(following, [*tensors, *module.parameters()])
        starts = {tensor.grad_fn for tensor in tensors}
        own = (node for node in backward_nodes(tree_leaves(output), starts.__contains__) if node not in starts)
        facts.reentrant = any(node.name() == "CheckpointFunctionBackward" for node in own)
        facts.outputs, notes_of_twice = [output], []
        for more, batch in twice:
            with suppress(Exception):  # a user's code
                facts.outputs.append(self._called(call, module, more, batch, notes_of_twice, nullcontext()))
        if len(facts.outputs) == 2:
            facts.draws |= [(path, (2 * shape[0], *shape[1:])) for path, shape in notes] != notes_of_twice
            if not isinstance(output, Sums) and not facts.gathers:
                each = zip(as_tuple(output), _sample_dims(list(map(as_tuple, facts.outputs))), strict=False)
                facts.passes = any(len(of) != 1 and effects.computes(tensor) for tensor, of in each)
        return facts

    def _called(
        self, call: Call, module: nn.Module, tensors: tuple[Tensor, ...], batch: Batch, notes: list, mode: Any
    ) -> Any:
        """Call a layer or a loss in a torch mode. Dropout by sample adds itself to ``notes`` and draws no numbers."""
        with torch.set_grad_enabled(self.training), computing(Samples(len(batch), notes=notes)), mode:
            return call(module, tensors, batch)

    def _differs_by_halves(self, loss: Facts, call: Call, module: nn.Module, targets: Tensors) -> bool:
        whole, dims = len(self.batches[1]), _sample_dims(loss.given)
        few = min(_ASKED, whole)
        rows = torch.linspace(0, len(as_tuple(targets)[0]) - 1, few, dtype=torch.float64).long()
        targets = converted(mapped(lambda x: x[rows], targets), torch.float32)

        def sums(first: int, count: int) -> Tensor:
            part = some_samples(outputs, dims, first, count, few)
            return call(module, part, Batch(part, mapped(lambda x: x[first : first + count], targets))).stack()

        with suppress(Exception), torch.no_grad():  # a user's code
            outputs = some_samples(loss.given[1], dims, 0, few, whole)
            if dims and sum(tensor.numel() for tensor in outputs) <= MOST_OUTPUTS:
                outputs = made_up(outputs)
                if loss.name != LOSS:
                    module = self.chain.build([loss.name], 0, CPU)[loss.name]
                both = sums(0, few // 2) + sums(few // 2, few // 2)
                return not torch.allclose(both, sums(0, few), rtol=_SAME, equal_nan=True)
        return False

    def _is_stale(self, parameter: nn.Parameter) -> bool:
        """Return whether a run would compute with this parameter but train its replacement."""
        return parameter in self.replaced or (parameter.requires_grad and parameter.device.type != "meta")


def _output(name: str, module: nn.Module, tensors: tuple[Tensor, ...], _: Batch) -> Tensors:
    output = module(*tensors)
    checked(name, module, output)
    return output


def backward_nodes(outputs: Iterable[Any], ends: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield each node of the backward graph of some tensors once. Do not go past a node for which ``ends`` is true."""
    seen, nodes = set(), [getattr(output, "grad_fn", None) for output in outputs]
    while nodes:
        if (node := nodes.pop()) is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [] if ends(node) else [following for following, _ in node.next_functions]


def _is_spoilt(output: Any, inputs: Sequence[Tensor]) -> bool:
    """Return whether a backward from ``output`` fails because a tensor was changed in place."""
    ends, starts = ([t for t in tree_leaves(some) if t.requires_grad] for some in (output, inputs))
    try:
        torch.autograd.grad(ends, starts, [torch.ones_like(t) for t in ends], retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        return "inplace operation" in str(error)
    return False


def _needs_numbers(error: Exception | None) -> bool:
    """Return whether a layer failed because it reads numbers, as ``.tolist()``, ``.numpy()`` and ``.cpu()`` do."""
    words = ("meta tensor", "meta device")
    return isinstance(error, (NotImplementedError, TypeError)) and any(word in str(error) for word in words)


def made_up(tensors: Any, device: str = "cpu") -> Any:
    """Return numbers from 0 to 1 in the shapes and dtypes of tensors. No result is a leaf, which cannot change."""

    def drawn(like: Tensor) -> Tensor:
        numbers = torch.rand(like.shape, device=device).to(like.dtype)
        return numbers.requires_grad_().clone() if like.requires_grad else numbers

    with seeded(0):
        return tuple(map(drawn, tensors)) if isinstance(tensors, tuple) else drawn(tensors)


def _replace_parameters(layer: nn.Module) -> set[nn.Parameter]:
    """Replace the parameters of a layer on the meta device, as a run does. Return the original parameters."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # several names may share a parameter
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                made[parameter] = nn.Parameter(parameter.detach(), parameter.requires_grad)
            setattr(module, name, made[parameter])
    return set(made)


def _calls_of_batchnorm(name: str, layer: nn.Module) -> Counter[str]:
    """Count the calls, from now on, that update the statistics of each BatchNorm in a layer."""
    calls: Counter[str] = Counter()
    for path, norm in layer.named_modules(prefix=name):
        if isinstance(norm, StepBatchNorm) and norm.training:
            norm.register_forward_pre_hook(lambda *_, path=path: calls.update([path]))
    return calls


def _range(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the lowest and the highest number of integer tensors; None for other tensors and for empty ones."""
    if any(tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.numel() == 0 for tensor in tensors):
        return None
    return min(int(tensor.min()) for tensor in tensors), max(int(tensor.max()) for tensor in tensors)


def _sample_dims(given: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Return the dimensions of each tensor that differ for twice the samples; empty if these are unknown."""
    pairs = zip(*given, strict=False) if len(given) == 2 else ()
    return [[i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=False)) if m != n] for a, b in pairs]


def reads_numbers(name: str, kind: str) -> PlanError:
    """Return the error for a layer whose shapes depend on numbers, which fake tensors do not have."""
    return PlanError(
        f"layer {name!r} ({kind}) reads numbers out of tensors, as .item(), .numpy(), bool(), an if or a mask as an "
        "index do. Pipelines, train.compile=true, parallel.balance=size and mode=plan have to know all shapes before "
        "there are numbers. Compute it with tensors (torch.where), or use parallel=single or ddp without these"
    )


def some_samples(
    tensors: Sequence[Tensor], sample_dims: Sequence[Sequence[int]], first: int, count: int, whole: int
) -> tuple[Tensor, ...]:
    """Return ``count`` samples starting at ``first``. Each tensor has ``whole`` samples along its ``sample_dims``."""

    def part(x: Tensor, dims: Sequence[int]) -> Tensor:
        for dim in dims:
            each = x.shape[dim] // whole  # of a sample
            x = x.narrow(dim, first * each, count * each)
        return x

    return tuple(map(part, tensors, sample_dims))
