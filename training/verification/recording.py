"""Writing down what every layer gets and gives in one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.chain import as_tuple
from models.losses import Sums
from parallel.stage import Stage

INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = "input", "output", "gradient of its output", "gradient of its input"


@contextmanager
def recorded(step: int, path: Path) -> Iterator[None]:
    """Write what each layer gets and gives in a step, with the gradients, to ``path``."""
    inner, records = Stage.compute_layer, {}

    def note(where: tuple, tensors: Any, forward: str, backward: str) -> None:
        for i, tensor in enumerate(t for t in tensors if isinstance(t, Tensor)):
            # The first time: a recomputation does not count.
            records.setdefault((*where, forward, i), tensor.detach().cpu().clone())
            if tensor.requires_grad:
                tensor.register_hook(lambda g, i=i: records.setdefault((*where, backward, i), g.detach().cpu().clone()))

    def compute_layer(stage: Stage, name: str, layer: Any, where: tuple[int, int] | None, *tensors: Any) -> Any:
        wanted = stage.training and stage.step == step and where is not None
        if wanted:
            note((name, where[0]), tensors, INPUT, INPUT_GRADIENT)
        output = inner(stage, name, layer, where, *tensors)
        if wanted:
            given = (output.loss, output.count) if isinstance(output, Sums) else as_tuple(output)
            note((name, where[0]), given, OUTPUT, OUTPUT_GRADIENT)
        return output

    Stage.compute_layer = compute_layer
    try:
        yield
    finally:
        Stage.compute_layer = inner
        torch.save(records, path)
