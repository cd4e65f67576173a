"""The shapes and dtypes of the layers' outputs, inferred by running the chain on fake tensors.

Fake tensors have no memory but have a device, so autocast treats them as in the run. Autocast does not cast plain meta
tensors, and a stage border declared float32 corrupts data silently if the run sends bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.errors import PlanError
from data.dataset import Batch, mapped
from models.chain import CPU, Chain, LayerSpec, as_tuple, checked, converted, without_weights
from models.losses import copy_to_try, loss_of
from models.seeds import Samples, computing, seeded
from parallel.devices import autocast, between_layers, parameter_dtype
from parallel.examination import made_up, reads_numbers
from parallel.watching import Watch


class LayerTrace(NamedTuple):
    """The outputs of a layer, or the loss for the last layer, and the modes under which the layer was computed.

    The tensors are on the meta device, and require a gradient if the run sends a gradient back to them. There are two
    modes, one for each of two micro-batches. There are none if torch does not let the modes watch the layer.
    """

    outputs: tuple[Tensor, ...]
    seen: Sequence[Any]


@torch.enable_grad()
def trace(
    chain: Chain,
    sample: Batch,
    precision: str,
    device_type: str,
    watch: Callable[[dict[int, Tensor]], Watch] | None = None,
) -> list[LayerTrace]:
    """Run one micro-batch through the chain on fake tensors, and return one trace per layer.

    A layer that fake tensors cannot compute is run on the CPU, with weights and made-up inputs.

    Args:
        chain: The model.
        sample: One micro-batch.
        precision: The precision of the run.
        device_type: The device type of the run, which decides what autocast casts.
        watch: A function that makes a torch mode, in which a layer computes, from the storages of the layer's
            parameters by address. None to infer shapes only.

    Raises:
        PlanError: If a layer reads the numbers in its tensors.
        TypeError: If a layer returns neither a tensor nor a flat tuple of tensors.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    dtype, fakes, loss = parameter_dtype(precision), FakeTensorMode(allow_non_fake_inputs=True), copy_to_try(chain.loss)
    by_numbers = (DataDependentOutputException, DynamicOutputShapeException)
    batch = sample.map(lambda tensor: converted(tensor, dtype))

    def faked(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with fakes:
            return made_up(tensors, device_type)

    def traced(layer: LayerSpec, tensors: tuple[Tensor, ...]) -> tuple[LayerTrace, tuple[Tensor, ...]]:
        blank, error = layer.made(), None  # outside of the mode, where an initializer finds that there are no numbers
        for real, watching in ((False, watch), (True, watch), (True, None)):
            try:
                with seeded(0) if real else fakes, autocast(precision, "cpu" if real else device_type):
                    outputs, seen = run(layer, blank, tensors, real, watching)
                outputs = faked(outputs) if real else outputs
                return LayerTrace(tuple(map(on_meta, outputs)), seen), outputs
            except (PlanError, ValueError):  # BatchNorm raises the latter for one sample
                raise
            except Exception as failure:  # a user's code
                if isinstance(failure, by_numbers) and layer is not chain.layers[-1]:  # no shape depends on the loss
                    raise reads_numbers(layer.name, type(blank).__name__) from None
                error = failure
        assert error is not None
        raise error

    def run(
        layer: LayerSpec, blank: nn.Module, tensors: tuple[Tensor, ...], real: bool, watching: Callable | None
    ) -> tuple[tuple[Tensor, ...], Sequence[Watch]]:
        """Compute a layer for one micro-batch, or for two if it is watched. The second finds the weights cast."""
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
        last, seen = layer is chain.layers[-1], [] if watching is None else [watching(known), watching(known)]
        loss_from = loss_of(module) or (lambda *x: loss(module(*x[:-2]), *x[-2:]))
        for mode in seen or [nullcontext()]:
            given = tuple(tensor.clone() for tensor in tensors)  # each micro-batch has its own
            with mode:
                output = loss_from(*given, mapped(torch.clone, targets), None).loss if last else module(*given)
        outputs = checked(layer.name, module, output)
        return outputs if last else as_tuple(converted(outputs, between_layers(precision))), seen

    inputs = faked(batch.input_tensors)
    with computing(Samples(len(sample), notes=[])):
        return list(chain.walk(inputs, traced))


def on_meta(x: Tensor) -> Tensor:
    """Return a tensor without memory or history. It requires a gradient if ``x`` does."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
