"""Records of the inputs and outputs of every layer in a step, and runs in which every result is moved by rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map

from models import sequence
from models.chain import LOSS, as_tuple
from models.losses import Sums
from parallel.stage import Stage

KINDS = INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = (
    "input", "output", "gradient of its output", "gradient of its input",
)  # fmt: skip
Key = tuple[str, int, str, int]  # layer, first sample of the micro-batch, kind, number


@contextmanager
def recorded(step: int, path: Path) -> Iterator[None]:
    """Write the inputs, outputs and gradients of every layer in a step to ``path``.

    The file also has this rank's positions, and the factor of the loss, which the gradients contain.
    """
    records: dict[tuple, Tensor] = {}
    positions: list[int] = []
    scale = 1.0

    def note(key: tuple, tensor: Tensor) -> None:
        records.setdefault(key, tensor.detach().to("cpu", copy=True))  # the first value: a recomputation does not count

    def watch(where: tuple, tensors: Any, forward: str, backward: str) -> None:
        for i, tensor in enumerate(t for t in tensors if isinstance(t, Tensor)):
            note((*where, forward, i), tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda g, i=i: note((*where, backward, i), g))

    def hook(stage: Stage, name: str, where: tuple[int, int] | None, layer: Callable, *tensors: Any) -> Any:
        nonlocal scale
        if not stage.training or stage.step != step or where is None or name == LOSS:
            return layer(*tensors)
        scale = stage.loss_scale
        if (part := sequence.part()) is not None:
            positions[:] = part.positions.tolist()
        watch((name, where[0]), tensors, INPUT, INPUT_GRADIENT)
        output = layer(*tensors)
        given = (output.loss, output.count) if isinstance(output, Sums) else as_tuple(output)
        watch((name, where[0]), given, OUTPUT, OUTPUT_GRADIENT)
        return output

    Stage.layer_hook = hook
    try:
        yield
    finally:
        Stage.layer_hook = None
        torch.save((records, positions, scale), path)


@contextmanager
def perturbed(precision: str, seed: int) -> Iterator[None]:
    """Multiply what each module without children returns by random numbers from 1 - eps to 1 + eps of the precision.

    This is the size of what another order of a sum changes. The gradients change in the same way in the backward.
    """
    eps = torch.finfo(torch.float16 if precision == "fp16" else torch.bfloat16).eps
    generators: dict[torch.device, torch.Generator] = {}

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim():
            return x
        if x.device not in generators:
            generators[x.device] = torch.Generator(x.device).manual_seed(seed)
        noise = torch.rand(x.shape, generator=generators[x.device], device=x.device) * 2 - 1
        wide = x.to(torch.promote_types(x.dtype, torch.float32)) * (1 + eps * noise)
        return torch.where(wide.abs() < torch.finfo(x.dtype).max, wide, x).to(x.dtype)  # the lowest number of a mask

    def hook(module: nn.Module, _: Any, output: Any) -> Any:
        return output if any(True for _ in module.children()) else tree_map(moved, output)

    with register_module_forward_hook(hook):
        yield
