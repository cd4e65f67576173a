"""Writing down what every layer gets and gives in one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.losses import Sums
from parallel.stage import Stage

INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = "input", "output", "gradient of its output", "gradient of its input"


@contextmanager
def recorded(step: int | None, path: Path) -> Iterator[None]:
    """Write what each layer gets and gives in a step, with the gradients, to ``path``; with None, nothing."""
    if step is None:
        yield
        return
    inner, records = Stage.compute_layer, {}

    def note(key: tuple, tensor: Any) -> None:
        records.setdefault(key, tensor.detach().cpu().clone())  # not that of a recomputation

    def compute_layer(stage: Stage, name: str, layer: Any, where: tuple[int, int] | None, *tensors: Any) -> Any:
        wanted = stage.training and stage.step == step and where is not None
        inputs = [t for t in tensors if isinstance(t, Tensor)] if wanted else []
        for i, tensor in enumerate(inputs):
            note((name, where[0], INPUT, i), tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda g, i=i: note((name, where[0], INPUT_GRADIENT, i), g))
        output = inner(stage, name, layer, where, *tensors)
        if wanted:
            given = output if isinstance(output, tuple) else (output,)
            given = (output.loss, output.count) if isinstance(output, Sums) else given
            for i, tensor in enumerate(given):
                note((name, where[0], OUTPUT, i), tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda g, i=i: note((name, where[0], OUTPUT_GRADIENT, i), g))
        return output

    Stage.compute_layer = compute_layer
    try:
        yield
    finally:
        Stage.compute_layer = inner
        torch.save(records, path)
