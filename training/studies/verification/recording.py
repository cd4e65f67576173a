"""Records of the inputs and outputs of every layer in a step, forward and backward, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.chain import LOSS, as_tuple
from models.losses import Sums
from parallel.stage import Stage

KINDS = INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = (
    "input", "output", "gradient of its output", "gradient of its input",
)  # fmt: skip
Key = tuple[str, int, str, int]  # layer, first sample of the micro-batch, kind, number


@contextmanager
def recorded(step: int, path: Path) -> Iterator[None]:
    """Write the inputs, outputs and gradients of every layer in a step to ``path``."""
    records: dict[tuple, Tensor] = {}

    def note(key: tuple, tensor: Tensor, scale: float = 1.0) -> None:
        records.setdefault(key, (tensor.detach() / scale).cpu())  # the first value: a recomputation does not count

    def watch(where: tuple, tensors: Any, forward: str, backward: str, scale: float) -> None:
        for i, tensor in enumerate(t for t in tensors if isinstance(t, Tensor)):
            note((*where, forward, i), tensor)
            if tensor.requires_grad:  # replicas scale their loss by the factor of their sum
                tensor.register_hook(lambda g, i=i: note((*where, backward, i), g, scale))

    def hook(stage: Stage, name: str, where: tuple[int, int] | None, layer: Callable, *tensors: Any) -> Any:
        if not stage.training or stage.step != step or where is None or name == LOSS:
            return layer(*tensors)
        watch((name, where[0]), tensors, INPUT, INPUT_GRADIENT, stage.loss_scale)
        output = layer(*tensors)
        given = (output.loss, output.count) if isinstance(output, Sums) else as_tuple(output)
        watch((name, where[0]), given, OUTPUT, OUTPUT_GRADIENT, stage.loss_scale)
        return output

    Stage.layer_hook = hook
    try:
        yield
    finally:
        Stage.layer_hook = None
        torch.save(records, path)
