"""Finds where in a step the first numbers that are not finite appear."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from data.dataset import Batch
from models.chain import as_tuple
from parallel.pieces import local
from parallel.strategy import Strategy


def first_not_finite(strategy: Strategy, batch: Batch, step: int) -> str:
    """Repeat a step and look for the first numbers that are not finite. All ranks call this together.

    This recomputes the gradients and changes nothing else.

    Args:
        strategy: The model.
        batch: The step's batch.
        step: Its number.

    Returns:
        A description of these numbers, and of the ranks that have them; empty if all numbers are finite.
    """
    position = {name: n for n, name in enumerate(strategy.chain.names)}
    # Sorted in the order of a step: (0 forward, 1 or 2 backward; position of the layer, negative in a backward; words).
    found: list[tuple[int, int, str]] = []

    def look_at_layer(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        kind = type(layer).__name__
        if not _finite(layer.parameters()):
            found.append((0, position[name], f"a weight of layer {name!r} ({kind})"))
        elif not _finite(as_tuple(output)):
            found.append((0, position[name], f"the output of layer {name!r} ({kind})"))
        for x in inputs:
            if x.requires_grad:
                words = f"the gradient that layer {name!r} ({kind}) gives"
                x.register_hook(partial(look_at_gradient, (1, -position[name], words)))

    def look_at_gradient(entry: tuple[int, int, str], gradient: Tensor) -> None:
        if not _finite([gradient]):
            found.append(entry)

    def look_at_loss(stage: nn.Module, inputs: Any, output: Any) -> None:
        if stage.ends_chain and not _finite(as_tuple(output)):
            found.append((0, len(position), "the loss"))

    handles = []
    for stage in strategy.stages:
        if stage.begins_chain and not _finite(batch.input_tensors):
            found.append((0, -1, "an input of the batch"))
        if stage.ends_chain and not _finite([batch.targets]):
            found.append((0, len(position) - 1, "a target of the batch"))
        handles.append(stage.register_forward_hook(look_at_loss))
        handles += [layer.register_forward_hook(partial(look_at_layer, name)) for name, layer in stage.layers.items()]
    try:
        with torch.compiler.set_stance("force_eager"):  # layers that are compiled already would not call the hooks
            strategy.train_step(batch, step)
    finally:
        for handle in handles:
            handle.remove()
    for stage in strategy.stages:  # parameters' gradients are known only as averages over replicas
        for name, layer in stage.layers.items():
            if not _finite(p.grad for p in layer.parameters() if p.grad is not None):
                found.append((2, -position[name], f"the gradient of layer {name!r} ({type(layer).__name__})"))
    firsts = strategy.mesh.gather(min(found, default=None))
    if not any(firsts):
        return ""
    first = min(entry for entry in firsts if entry)
    ranks = [rank for rank, entry in enumerate(firsts) if entry == first]
    where = f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if strategy.mesh.size > 1 else ""
    return first[2] + where


def _finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(local(x.detach()).isfinite().all()) for x in tensors)
