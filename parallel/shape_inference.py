"""What each layer receives, returns and keeps for the backward, inferred by running the chain on fake tensors.

Fake tensors have no memory but carry a device, so autocast acts on them as it will in the run. Plain meta tensors are
not cast, and a stage border declared float32 corrupts data silently if the run sends bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from common.errors import PlanError
from data.dataset import Batch
from models.chain import CPU, Chain, LayerSpec, as_tuple, checked, converted, without_weights
from models.losses import Loss, copy_to_try, loss_of
from models.seeds import Samples, computing, seeded
from parallel.devices import autocast, between_layers, parameter_dtype
from parallel.examination import made_up, reads_numbers
from parallel.watching import Measure


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
        work: The work of one micro-batch, if ``trace`` was to count it.
    """

    outputs: tuple[TensorSpec, ...]
    kept: int
    cast: int
    work: Measure

    @property
    def output_bytes(self) -> int:
        """Size of the tensors that the layer returns."""
        return sum(spec.bytes for spec in self.outputs)


# How a layer is tried until torch can compute it: with numbers, watched, and by operator in place of hooks.
_WAYS = ((False, True, False), (False, True, True), (True, True, False), (True, True, True), (True, False, False))


@torch.enable_grad()
def trace(chain: Chain, sample: Batch, precision: str, device_type: str, count: bool = False) -> list[LayerTrace]:
    """Run one micro-batch through the chain on fake tensors; return one trace per layer.

    A layer that fake tensors cannot compute is run on the CPU, with weights and made-up inputs. Where torch does not
    let it be watched by hooks (``torch.func.grad``), all that operators compute with counts as kept; where not at all
    (``flex_attention``), nothing is counted.

    Args:
        chain: The model.
        sample: One micro-batch.
        precision: The run's.
        device_type: The run's, on which it depends what is cast.
        count: Whether to count the work, too.

    Raises:
        PlanError: If a layer reads numbers out of its tensors.
        TypeError: If a layer returns neither a tensor nor a flat tuple of tensors.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    dtype, fakes, loss = parameter_dtype(precision), FakeTensorMode(allow_non_fake_inputs=True), copy_to_try(chain.loss)
    batch = sample.map(lambda tensor: converted(tensor, dtype))

    def faked(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with fakes:
            return made_up(tensors, device_type)

    def traced(layer: LayerSpec, tensors: tuple[Tensor, ...]) -> tuple[LayerTrace, tuple[Tensor, ...]]:
        blank, error = layer.made(), None  # outside of the mode, where an initialiser finds that there are no numbers
        for real, *watching in _WAYS:
            try:
                with seeded(0) if real else fakes, autocast(precision, "cpu" if real else device_type):
                    outputs, (first, second) = run(layer, blank, tensors, real, *watching)
                outputs = faked(outputs) if real else outputs
                specs = tuple(map(TensorSpec.of, outputs))
                return LayerTrace(specs, second.kept, max(0, first.kept - second.kept), second), outputs
            except (DataDependentOutputException, DynamicOutputShapeException):
                raise reads_numbers(layer.name, type(blank).__name__) from None
            except (PlanError, ValueError):  # BatchNorm raises the latter for one sample
                raise
            except Exception as failure:  # a user's code
                error = failure
        assert error is not None
        raise error

    def run(
        layer: LayerSpec, blank: nn.Module, tensors: tuple[Tensor, ...], real: bool, watched: bool, by_operator: bool
    ) -> tuple[tuple[Tensor, ...], list[Measure]]:
        """Compute a layer for two micro-batches. The second finds the weights cast, so it keeps activations only."""
        if real:
            module, targets = chain.build([layer.name], 0, CPU, dtype)[layer.name], batch.targets
            tensors = batch.input_tensors if tensors is inputs else made_up(tensors)
        else:
            targets = made_up(batch.targets, device_type)
            with torch.device(device_type):  # fake parameters cannot be converted later
                module = without_weights(blank, dtype=dtype)
        if hasattr(module, "step_cache"):
            # As in the middle of a step.
            module.step_cache = {}  # pyright: ignore[reportArgumentType]  # its stub knows tensors only
        known: dict[int, Tensor] = {p.untyped_storage()._cdata: p for p in module.parameters()}
        last, works = layer is chain.layers[-1], [Measure(known, count, by_operator) for _ in range(2)]
        for work, given in zip(works, (tensors, tuple(t.clone() for t in tensors)), strict=True):  # each has its own
            with work if watched else nullcontext():
                output = _loss(loss, module, given, targets.clone()) if last else module(*given)
        if not watched:
            works[-1].uncounted = {f"layer {layer.name!r}"}
        outputs = checked(layer.name, module, output)
        return outputs if last else as_tuple(converted(outputs, between_layers(precision))), works

    inputs = faked(batch.input_tensors)
    with computing(Samples(len(sample), notes=[])):
        return list(chain.walk(inputs, traced))


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
