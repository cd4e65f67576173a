"""A linear layer and the cross entropy over its output, as one operation.

Over 50,304 words the plain pair spends more time moving logits than multiplying: a float32 copy of them, their
log-softmax, and its gradient, each larger than every cache. Here the logits exist once, in the compute dtype,
and the row-wise part runs over blocks of rows that fit a cache, turning them in place into their own gradient.
Sums and exponentials are taken in float32 whatever the compute dtype.

The forward therefore already does the element-wise half of the backward; without gradients that half is left out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.losses import IGNORED

# Rows to a block. CPU: 16 x 50,304 x 4 bytes is 3 MiB, measured fastest of 16, 64, 256 on one and two threads.
# Elsewhere large blocks, which bound the float32 copy to 1.6 GB.
CPU_ROWS, OTHER_ROWS = 16, 8192


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, cast: Tensor, targets: Tensor, bias: Tensor | None, needs_grad: bool
    ) -> Tensor:
        logits = F.linear(x, cast, None if bias is None else bias.to(cast.dtype))
        rows = CPU_ROWS if x.device.type == "cpu" else OTHER_ROWS
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for start in range(0, len(targets), rows):
            block, target = logits[start : start + rows], targets[start : start + rows, None]
            counted = target != IGNORED
            target = target.clamp(min=0)
            log_probabilities = torch.log_softmax(block.to(total.dtype), dim=1)
            total -= (log_probabilities.gather(1, target) * counted).sum()
            if needs_grad:
                gradient = log_probabilities.exp_()
                gradient.scatter_add_(1, target, gradient.new_full((len(target), 1), -1.0))
                block.copy_(gradient)
        if needs_grad:
            # Rows that do not count get no gradient: zeroing x does that for the weight, and x is the small one.
            counted = (targets != IGNORED)[:, None]
            ctx.save_for_backward(x * counted, cast, logits, counted)
            ctx.dtypes, ctx.biased = (x.dtype, weight.dtype), bias is not None
        return total

    @staticmethod
    def backward(ctx, scale: Tensor):
        x, cast, gradient, counted = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        # The scale may be float16's loss scale (65,536 and up): applied after the products, in float32.
        grad_x = (gradient @ cast).to(scale.dtype).mul_(scale * counted).to(x_dtype)
        shrunk, shrink = _shrunk(x, len(x))
        grad_weight = (gradient.t() @ shrunk).to(weight_dtype).mul_(scale.to(weight_dtype) / shrink)
        grad_bias = None
        if ctx.biased:  # a product, because that adds up in float32
            shrunk, shrink = _shrunk(counted.to(gradient.dtype), len(x))
            grad_bias = (shrunk.t() @ gradient)[0].to(weight_dtype).mul_(scale.to(weight_dtype) / shrink)
        return grad_x, grad_weight, None, None, grad_bias, None


def _shrunk(x: Tensor, rows: int) -> tuple[Tensor, Tensor | float]:
    """``x`` times a power of two, and that power: ``g.t() @ x`` is then no infinity of float16 for any |g| <= 1.

    At 64k rows a frequent word's sum passes 65,504, and no loss scale would help: it is applied after the product. The
    power follows from the largest element; float16 loses nothing by it but the lowest bits of numbers below 2e-3.
    """
    if x.dtype != torch.float16:
        return x, 1.0
    bound = x.abs().amax().float() * rows
    shrink = torch.exp2(torch.floor(torch.log2(32768.0 / bound))).clamp(max=1.0)
    return x * shrink.to(x.dtype), shrink


def fused_cross_entropy(x: Tensor, weight: Tensor, cast: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Cross entropy of ``x @ weight.T + bias`` against ``targets``, summed over those that are not ``IGNORED``.

    Args:
        x: [n, c], hidden states in the compute dtype.
        weight: [v, c], the parameter, which gets the gradient.
        cast: [v, c], the same numbers in the compute dtype, without gradient (cast once per step by the caller).
        targets: [n], int64 classes below v, or ``IGNORED``.
        bias: [v], a parameter of the weight's dtype, or None.

    Returns:
        A scalar in float32 (float64 for float64).
    """
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias) if t is not None)
    return _FusedCrossEntropy.apply(x, weight, cast, targets, bias, needs_grad)
