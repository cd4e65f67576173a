"""Products of tokens with the matrices of the experts that they chose, one product per expert over contiguous rows.

The shapes depend on the number of tokens only, not on what the tokens chose, so tensors without numbers and compiled
graphs compute the same operators.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op


def by_expert(
    hidden: Tensor, chosen: Tensor, weights: Tensor, count: int, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Compute the weighted sum of the outputs of each token's experts.

    Args:
        hidden: [n, c]. There may be no tokens, and experts that no token chose.
        chosen: [n, k] int64, the experts of each token.
        weights: [n, k].
        count: The number of experts.
        compute: ([n k, c] rows in the order of their experts, [count] int32 end of each expert's rows) -> [n k, d]. The
            ends of rows on a GPU are on the CPU.

    Returns:
        [n, d] in the dtype of ``hidden``.
    """
    # ONNX has no stable sort.
    order = chosen.flatten().argsort() if torch.compiler.is_exporting() else chosen.flatten().argsort(stable=True)
    ones = torch.ones_like(order)
    ends = ones.new_zeros(count).scatter_add_(0, chosen.flatten(), ones).cumsum(0).int()
    if ends.is_cuda:  # the host needs them: it waits here, once, and not in each product
        ends = ends.cpu()
    place = torch.empty_like(order).scatter_(0, order, ones.cumsum(0) - 1)  # the row of each pair of token and expert
    outputs = compute(hidden.index_select(0, order // chosen.shape[1]), ends)
    # The weighted sum of each token's rows, without a copy of the rows in another order.
    weights, bags = weights.to(outputs.dtype), place.view_as(chosen)
    return F.embedding_bag(bags, outputs, per_sample_weights=weights, mode="sum").to(hidden.dtype)


def product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each group with its matrix, under autocast in its dtype.

    Args:
        rows: [n, i]; the rows of group e end before ``ends[e]``.
        matrices: [groups, i, o].
        ends: [groups] int32, on the device of the rows or on the CPU.

    Returns:
        [n, o].
    """
    kind = rows.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        rows, matrices = (x.to(torch.get_autocast_dtype(kind)) for x in (rows, matrices))
    return (_plain_product if torch.compiler.is_exporting() else _product)(rows, matrices, ends)


def _plain_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    # By torch's own operators, because a program is used without this module.
    group = torch.bucketize(torch.arange(rows.shape[0], device=rows.device), ends.to(rows.device), right=True)
    y = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for number, matrix in enumerate(matrices):
        own = (group == number).nonzero()[:, 0]
        y = y.index_copy(0, own, rows.index_select(0, own) @ matrix)
    return y


@custom_op("one_word_parallel::grouped_mm", mutates_args=())
def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    # On a CPU torch's F.grouped_mm takes as long, and has no float64 (torch 2.13).
    y = rows.new_empty(len(rows), matrices.shape[2])
    for part, matrix, out in zip(_parts(rows, ends), matrices, _parts(y, ends), strict=True):
        torch.mm(part, matrix, out=out)
    return y


@custom_op("one_word_parallel::grouped_outer_mm", mutates_args=())
def _outer_product(rows: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    """[n, i] and [n, o] -> [groups, i, o]: the sum over each group's rows."""
    y = rows.new_empty(len(ends), rows.shape[1], others.shape[1])
    for part, other, out in zip(_parts(rows, ends), _parts(others, ends), y, strict=True):
        torch.mm(part.t(), other, out=out)
    return y


def _parts(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return rows.split(ends.diff(prepend=ends.new_zeros(1)).tolist())


@_product.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@_outer_product.register_fake
def _(rows: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(ends), rows.shape[1], others.shape[1])


def _backward(ctx, gradient: Tensor):
    rows, matrices, ends = ctx.saved_tensors
    of_rows, of_matrices, _ = ctx.needs_input_grad
    gradient = gradient.contiguous()
    return (
        _product(gradient, matrices.transpose(1, 2), ends) if of_rows else None,
        _outer_product(rows, gradient, ends) if of_matrices else None,
        None,
    )


_product.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
