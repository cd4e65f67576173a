"""Auxiliary losses: functions of sums over the global batch, such as the balance of a mixture of experts.

A layer passes a tensor through ``attach``, together with its sums over the micro-batch. A training step adds the sums
up over micro-batches, replicas and stages, and gives each layer the gradient of the loss at the totals::

    total = sum of sums over the global batch
    loss  = loss of the targets + F(total)

The loss of one micro-batch would be another loss: a product of two means is not the mean of the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from common.errors import ModelError

Function = Callable[[Tensor], Tensor]  # [n] totals in float64 -> the loss, a scalar


@dataclass
class Collected:
    """The sums of the layers of this process in one training step.

    Attributes:
        sums: The sums of each key in float64 (float32 on MPS), until now.
        losses: The loss of each key that has one.
        after: The function that follows the step, by key.
        gradients: The gradient of each key's loss with respect to its sums. A step sets it before a backward.
        open: Whether forwards still add sums. Recomputations in a backward never do.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[str, Function] = field(default_factory=dict)
    after: dict[str, Callable[[Tensor], None]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    open: bool = True


C = TypeVar("C", Collected, None)
_step: Collected | None = None


@contextmanager
def collecting(into: C) -> Iterator[C]:
    """Collect the sums of the forwards in the block; with None, do not."""
    global _step
    before, _step = _step, into
    try:
        yield into
    finally:
        _step = before


def leave_uncompiled() -> None:
    """Exclude ``attach`` from torch.compile. Not done by importing this file, as importing the compiler takes time."""
    global _attach
    _attach = torch.compiler.disable(_attach)  # pyright: ignore[reportAssignmentType]


def attach(
    x: Tensor,
    key: str,
    sums: Tensor,
    loss: Function | None = None,
    after_step: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Add a loss of sums over the global batch to the training loss.

    Outside of a training step this does nothing. All positions of the batch count, those without a target too.

    Args:
        x: A tensor on which the loss of the targets depends. The gradient of ``sums`` is computed with its gradient.
        key: The name of the sums. Sums of layers with the same key are added up, and have one loss. A module with an
            attribute ``full_name`` finds its name in the whole model there.
        sums: [n] in float32 or float64, this micro-batch's sums, on any device.
        loss: A function of the totals, [n] in float64: a differentiable scalar, which is added to the mean loss.
        after_step: A function that gets the totals, detached, after each step that updates the weights.

    Returns:
        ``x``.

    Raises:
        ModelError: If ``sums`` has 16 bits.
    """
    return _attach(x, key, sums, loss, after_step)


def _attach(
    x: Tensor, key: str, sums: Tensor, loss: Function | None, after_step: Callable[[Tensor], None] | None
) -> Tensor:
    step = _step
    if step is None:
        return x
    if sums.element_size() < 4:
        raise ModelError(f"sums of {sums.dtype} do not count beyond 256: compute the sums of {key!r} in float32")
    # Private: torch 2.13; torch.utils.checkpoint asks in the same way. Inside of a backward, layers are recomputed.
    if step.open and torch._C._current_graph_task_id() == -1:
        wide = sums.detach().to(torch.float32 if sums.device.type == "mps" else torch.float64)
        step.sums[key] = step.sums[key] + wide.to(step.sums[key].device) if key in step.sums else wide
        step.losses |= {} if loss is None else {key: loss}
        step.after |= {} if after_step is None else {key: after_step}
    return x if loss is None else _Attached.apply(x, sums, key, step)


class _Attached(torch.autograd.Function):
    """Returns ``x``. In the backward the sums get the gradient of their loss."""

    @staticmethod
    def forward(ctx, x: Tensor, sums: Tensor, key: str, step: Collected) -> Tensor:
        ctx.key, ctx.step, ctx.kind = key, step, (sums.device, sums.dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, ctx.step.gradients[ctx.key].to(*ctx.kind), None, None
