"""What each layer takes, gives and keeps, found by running the chain on tensors without memory.

Fake tensors carry the device, so autocast acts on them as it will in the run; plain meta tensors pass it by, and a
border declared float32 where the run sends bfloat16 corrupts silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from models.chain import Chain
from parallel.precision import autocast, parameter_dtype


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that crosses from one layer to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class LayerTrace:
    """``kept``: bytes that autograd holds for each micro-batch's backward; ``cast``: bytes of weights held in the
    compute dtype, once for all micro-batches of a step."""

    name: str
    output: TensorSpec
    kept: int
    cast: int


def trace(chain: Chain, inputs: Tensor, targets: Tensor, precision: str, device_type: str) -> list[LayerTrace]:
    """Run one micro-batch (inputs [b, ...], targets [b, ...]: real tensors, used for shape and dtype only)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = parameter_dtype(precision)
    traces = []
    with FakeTensorMode(allow_non_fake_inputs=True), autocast(precision, device_type):

        def fake(real: Tensor) -> Tensor:
            kind = dtype if real.is_floating_point() else real.dtype
            return torch.empty(real.shape, dtype=kind, device=device_type)

        x, goal = fake(inputs), fake(targets)
        for layer in chain.layers:
            with torch.device(device_type), _default_dtype(dtype):
                module = layer.build()
            if hasattr(module, "step_cache"):
                module.step_cache = {}  # as in the middle of a step
            kept = _Kept(module)
            with saved_tensors_hooks(kept.note, lambda tensor: tensor):
                # Twice: the second micro-batch finds the weights cast already, so it keeps activations only.
                sizes = []
                for received, wanted in ((x, goal), (x.clone(), goal.clone())):  # each micro-batch's own
                    before = kept.bytes
                    last = layer is chain.layers[-1]
                    output = _close(chain, module, received, wanted) if last else module(received)
                    sizes.append(kept.bytes - before)
            border = TensorSpec(tuple(output.shape), output.dtype)
            traces.append(LayerTrace(layer.name, border, kept=sizes[1], cast=sizes[0] - sizes[1]))
            x = output
    return traces


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    # Module.to() cannot swap fake parameters, so they are made in the right dtype.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _close(chain: Chain, module: torch.nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """The loss of the last layer, whose output never leaves the stage."""
    if hasattr(module, "loss"):
        return module.loss(x, targets, None).loss
    return chain.loss(module(x), targets, None).loss


class _Kept:
    """Adds up the storages that autograd saves, each once, parameters left out."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.bytes = 0
        self._alive: list[Tensor] = [*module.parameters()]
        self._known = {p.untyped_storage()._cdata for p in module.parameters()}

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(tensor)  # or its address is given to another
            self.bytes += storage.nbytes()
        return tensor
