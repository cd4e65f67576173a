"""What each layer receives, returns and keeps for the backward, inferred by running the chain on fake tensors.

Fake tensors have no memory but carry a device, so autocast acts on them as it will in the run. Plain meta tensors are
not cast, and a stage border declared float32 corrupts data silently if the run sends bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from common.errors import PlanError
from data.dataset import Batch
from models.chain import CPU, Chain, LayerSpec, as_tuple, checked, converted, without_weights
from models.losses import Loss, copy_to_try, loss_of
from models.seeds import Samples, computing, seeded
from parallel.devices import autocast, between_layers, parameter_dtype
from parallel.examination import Draws, Watch, reads_numbers
from parallel.plan import Plan


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
        work: The context that ``trace`` made by ``counting`` and that has seen the operators of one micro-batch.
    """

    outputs: tuple[TensorSpec, ...]
    kept: int
    cast: int
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
    loss = copy_to_try(chain.loss)

    def fake(given: Tensor) -> Tensor:
        kind = dtype if given.is_floating_point() else given.dtype
        return given.to(kind) if real else torch.empty(given.shape, dtype=kind, device=device_type)

    def traced(layer: LayerSpec, tensors: tuple[Tensor, ...]) -> tuple[LayerTrace, tuple[Tensor, ...]]:
        with torch.device(device_type):  # fake parameters cannot be converted later
            made = without_weights(blank[layer.build], dtype=dtype)
        module = chain.build([layer.name], 0, CPU, dtype)[layer.name] if real else made
        if hasattr(module, "step_cache"):
            # As in the middle of a step.
            module.step_cache = {}  # pyright: ignore[reportArgumentType]  # its stub knows tensors only
        kept, last = _Kept(module), layer is chain.layers[-1]

        def run(*watching):
            # Twice: the second micro-batch finds the weights cast already, so it keeps activations only.
            sizes = []
            with ExitStack() as stack:
                for watch in watching:
                    stack.enter_context(watch)
                for inputs in (tensors, tuple(t.clone() for t in tensors)):  # each micro-batch has its own
                    before, counted = kept.bytes, counting()
                    with counted if watching else nullcontext():
                        output = _loss(loss, module, inputs, targets.clone()) if last else module(*inputs)
                    sizes.append(kept.bytes - before)
            return output, sizes, counted

        try:
            saved = saved_tensors_hooks(kept.hold, lambda tensor: tensor)
            output, sizes, counted = run(saved, Draws() if real else _Workspace(kept))
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise reads_numbers(layer.name, type(module).__name__) from None
        except Exception as error:  # a user's code
            if "saved tensor hooks" in str(error):
                output, sizes, counted = run(kept)
            elif real:
                output, sizes, counted = run()
                counted.uncounted = {f"layer {layer.name!r}"}
            else:
                raise
        outputs = checked(layer.name, module, output)
        if not last:
            outputs = as_tuple(converted(outputs, between_layers(precision)))
        specs = tuple(map(TensorSpec.of, outputs))
        return LayerTrace(specs, sizes[1], max(0, sizes[0] - sizes[1]), counted), outputs

    fakes = nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
    with fakes, autocast(precision, device_type), computing(Samples(len(sample), notes=[])):
        inputs, targets = tuple(map(fake, sample.input_tensors)), fake(sample.targets)
        return list(chain.walk(inputs, traced))


def stage_borders(plan: Plan, chain: Chain, sample: Batch) -> list[tuple[TensorSpec, ...]]:
    """Infer the tensors of one micro-batch that stages 0, 1, ... receive, and finally the loss."""
    traces = trace(chain, sample, plan.precision, plan.device_type)
    outputs = {name: traced.outputs for name, traced in zip(chain.names, traces, strict=True)}
    received = tuple(map(TensorSpec.of, sample.input_tensors))
    *sent, loss = (outputs[stage.layers[-1]] for stage in plan.stages)
    if plan.sequence:  # each rank has a part of dimension 1
        sent = [tuple(spec.divided(plan.tp) for spec in specs) for specs in sent]
    return [received, *sent, loss]


def _loss(loss: Loss, module: nn.Module, tensors: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Return the loss of the last layer, whose output never leaves the stage.

    If the loss reads numbers, on which no shape depends, another number of its shape, which may be random, too.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    head_loss = loss_of(module)
    call = partial(loss, module(*tensors)) if head_loss is None else partial(head_loss, *tensors)
    try:
        return call(targets, None).loss
    except (DataDependentOutputException, DynamicOutputShapeException):
        total = torch.cat([t.flatten().to(torch.float32) for t in tree_leaves(call.args)]).sum()
        return total + torch.rand_like(total)


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


class _Workspace(Watch):
    """Adds what oneDNN's LSTM keeps for the backward in a workspace, of whose size fake tensors know nothing."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept

    def note(self, operator: Any, args: tuple, kwargs: dict) -> None:
        """See ``Watch``. The numbers that it keeps in each step of a sequence were measured with torch 2.13."""
        if operator is torch.ops.aten.mkldnn_rnn_layer.default:
            x, state, hidden = args[0], args[5], args[10]
            steps = x.shape[:-1].numel() + state.shape[:-1].numel()
            self._kept.bytes += x.itemsize * steps * (9 * hidden + 6 * max(hidden, x.shape[-1]))
