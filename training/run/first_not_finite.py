"""Finds the first numbers in a step that are not finite."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from data.dataset import Batch
from models.chain import as_tuple
from parallel.dtensor import local
from parallel.strategy import Strategy


def first_not_finite(strategy: Strategy, batch: Batch, step: int) -> str:
    """Repeat a step to find its first numbers that are not finite. All ranks call this together.

    This recomputes the gradients and changes nothing else.

    Args:
        strategy: The model.
        batch: The step's batch.
        step: The step's number.

    Returns:
        A phrase that names these numbers and the ranks that have them; empty if all numbers are finite.
    """
    position = {name: n for n, name in enumerate(strategy.chain.names)}
    # Sorted in the order of a step: (0 in forward, 1 or 2 in backward; layer's position, negative in backward; words).
    found: list[tuple[int, int, str]] = []

    def look(phase: int, place: int, words: str, tensors: Iterable[Tensor]) -> None:
        if not all(bool(local(x.detach()).isfinite().all()) for x in tensors):
            found.append((phase, place, words))

    def look_at_layer(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        place, this = position[name], f"layer {name!r} ({type(layer).__name__})"
        look(0, place, f"a weight of {this}", layer.parameters())
        look(0, place, f"the output of {this}", as_tuple(output))
        for x in inputs:
            if x.requires_grad:
                x.register_hook(lambda gradient: look(1, -place, f"the gradient that {this} gives", [gradient]))

    def look_at_loss(stage: nn.Module, inputs: Any, output: Any) -> None:
        if stage.ends_chain:
            look(0, len(position), "the loss", as_tuple(output))

    with ExitStack() as hooks:
        for stage in strategy.stages:
            if stage.begins_chain:
                look(0, -1, "an input of the batch", batch.input_tensors)
            if stage.ends_chain:
                look(0, len(position) - 1, "a target of the batch", batch.target_tensors)
            hooks.enter_context(stage.register_forward_hook(look_at_loss))
            for name, layer in stage.layers.items():
                hooks.enter_context(layer.register_forward_hook(partial(look_at_layer, name)))
        with torch.compiler.set_stance("force_eager"):  # compiled layers would not call the hooks
            strategy.train_step(batch, step)
    for stage in strategy.stages:  # parameters' gradients are known only as averages over replicas
        for name, layer in stage.layers.items():
            gradients = [p.grad for p in layer.parameters() if p.grad is not None]
            look(2, -position[name], f"the gradient of layer {name!r} ({type(layer).__name__})", gradients)
    firsts = strategy.mesh.gather(min(found, default=None))
    if not any(firsts):
        return ""
    first = min(entry for entry in firsts if entry)
    ranks = [rank for rank, entry in enumerate(firsts) if entry == first]
    where = f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if strategy.mesh.size > 1 else ""
    return first[2] + where
