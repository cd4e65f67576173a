"""A linear layer and the cross entropy over its output, as one operation; and the last layer of a language model.

With 50,304 words the two separate operations spend more time moving logits than multiplying. They make a float32 copy
of the logits, their log-softmax and its gradient, each larger than every cache. Here the logits exist once, in the
compute dtype. The row-wise part runs over blocks of rows that fit into a cache, and replaces them in place by their
gradient. Sums and exponentials are computed in float32 for every compute dtype.

On a GPU the row-wise part is one kernel (``models.cross_entropy_kernel``), if Triton can build it.

The forward therefore already does the element-wise half of the backward. Without gradients this half is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.losses import IGNORED, Sums, TokenCrossEntropy, assert_all, mask_targets
from models.seeds import passes

# Rows per block. On a CPU 16 (16 x 50,304 x 4 bytes are 3 MiB) was the fastest of 16, 64 and 256 on one and two
# threads. On other devices blocks are large, and limit the float32 copy to 1.6 GB.
CPU_ROWS, OTHER_ROWS = 16, 8192
PLAIN = TokenCrossEntropy()
_ELSEWHERE = -1  # the column of a target that belongs to another rank, or that does not count
# The smallest probability in a gradient. A confident model has many probabilities below 1e-38. These are subnormal in
# float32, and a CPU multiplies subnormal numbers up to eighty times as slowly.
_LEAST = 1e-30


def _by_blocks(logits: Tensor, targets: Tensor, needs_grad: bool, rows: int) -> Tensor:
    """Return the summed loss of ``logits`` [n, v]. If the gradient is needed, it replaces the logits."""
    total = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    for start in range(0, len(targets), rows):
        block, target = logits[start : start + rows], targets[start : start + rows, None]
        counted = target != IGNORED
        target = target.clamp(min=0)
        probabilities = torch.softmax(block, dim=1, dtype=total.dtype)
        # The most probable word tells the logarithm of the sum. The target's probability may have rounded to 0.
        most = block.amax(dim=1, keepdim=True).to(total.dtype) - block.gather(1, target)
        total += (most - probabilities.amax(dim=1, keepdim=True).log()).where(counted, 0.0).sum()
        if needs_grad:
            gradient = probabilities.clamp_(min=_LEAST)
            gradient.scatter_add_(1, target, gradient.new_full((len(target), 1), -1.0))
            block.copy_(gradient)
    return total


def _by_statistics(
    logits: Tensor, targets: Tensor, needs_grad: bool, words: Any, loss: TokenCrossEntropy
) -> tuple[Tensor, Tensor]:
    """Return the summed ``loss`` and cross entropy of ``logits`` [n, v], this rank's ``words``; None: all words.

    If the gradient is needed, it replaces the logits. The ranks exchange three numbers per row, four with label
    smoothing, and no logits.
    """
    counted, smoothing, count = targets != IGNORED, loss.label_smoothing, logits.shape[1]
    columns = targets if words is None else targets - words.start
    columns = columns.where(counted & (columns >= 0) & (columns < count), _ELSEWHERE)
    largest, *sums = _statistics(logits, columns)
    if smoothing:
        sums.append(logits.sum(dim=1, dtype=largest.dtype))
    if words is not None:
        most, count = words.largest(largest.clone()), words.count
        sums[0] = sums[0] * (largest - most).exp()
        largest, sums = most, words.sum(torch.stack(sums))
    total, of_target, *of_all = sums
    normaliser = largest + total.log()
    cross_entropy = terms = (normaliser - of_target) * counted
    if loss.z_loss:
        terms = terms + loss.z_loss * normaliser.square() * counted
        total = total / (1 + 2 * loss.z_loss * normaliser)  # which multiplies the probabilities in the gradient
    if needs_grad:
        _gradient(logits, columns, largest, total, loss.z_loss != 0)
    if smoothing:
        terms = terms + smoothing * (of_target - of_all[0] / count) * counted
        if needs_grad:
            of_targets = smoothing * (columns >= 0)[:, None].to(logits.dtype)
            logits.sub_(smoothing / count).scatter_add_(1, columns.clamp(min=0)[:, None], of_targets)
    return terms.sum(), cross_entropy.sum()


def _statistics_by_blocks(logits: Tensor, columns: Tensor, rows: int) -> Tensor:
    """Return the largest logit of each row, its sum of exp(logit - largest), and its target's logit or 0, [3, n]."""
    found = []
    for block, column in zip(logits.split(rows), columns.split(rows), strict=True):
        wide = block.to(torch.promote_types(block.dtype, torch.float32))
        largest = wide.amax(dim=1)
        of_target = wide.gather(1, column.clamp(min=0)[:, None])[:, 0].where(column >= 0, 0.0)
        found.append(torch.stack([largest, (wide - largest[:, None]).exp_().sum(dim=1), of_target]))
    return torch.cat(found, dim=1)


def _gradient_by_blocks(
    logits: Tensor, columns: Tensor, largest: Tensor, total: Tensor, signed: bool, rows: int
) -> None:
    """Replace ``logits`` by their gradient. ``largest`` and ``total`` belong to the whole vocabulary.

    A large z-loss of small logits makes ``total`` negative. Only if ``signed`` are signs looked at.
    """
    parts = (tensor.split(rows) for tensor in (logits, columns, largest + total.abs().log(), total))
    for block, column, normaliser, of_row in zip(*parts, strict=True):
        gradient = (block.to(normaliser.dtype) - normaliser[:, None]).clamp_(min=math.log(_LEAST)).exp_()
        if signed:
            gradient *= of_row.sign()[:, None]
        gradient.scatter_add_(1, column.clamp(min=0)[:, None], -(column >= 0)[:, None].to(gradient.dtype))
        block.copy_(gradient)


@torch.library.custom_op("one_word_parallel::cross_entropy_statistics", mutates_args=())
def _statistics(logits: Tensor, columns: Tensor) -> Tensor:
    """Compute the result of ``_statistics_by_blocks``, by the implementation for the device."""
    if _has_kernel(logits):
        from models.cross_entropy_kernel import statistics_of_rows

        return statistics_of_rows(logits, columns)
    return _statistics_by_blocks(logits, columns, _rows(logits))


@_statistics.register_fake
def _(logits: Tensor, columns: Tensor) -> Tensor:
    return logits.new_empty((3, len(logits)), dtype=torch.promote_types(logits.dtype, torch.float32))


@torch.library.custom_op("one_word_parallel::cross_entropy_gradient_", mutates_args={"logits"})
def _gradient(logits: Tensor, columns: Tensor, largest: Tensor, total: Tensor, signed: bool = False) -> None:
    """Compute ``_gradient_by_blocks`` by the implementation for the device."""
    if _has_kernel(logits):
        from models.cross_entropy_kernel import gradient_of_rows

        gradient_of_rows(logits, columns, largest, total)
    else:
        _gradient_by_blocks(logits, columns, largest, total, signed, _rows(logits))


# This is one operator, so torch.compile, and code that counts operators, need not know how it is computed.
@torch.library.custom_op("one_word_parallel::cross_entropy_", mutates_args={"logits"})
def _row_wise(logits: Tensor, targets: Tensor, needs_grad: bool) -> Tensor:
    """Compute the result of ``_by_blocks``, by the implementation for the device."""
    if _has_kernel(logits):
        from models.cross_entropy_kernel import cross_entropy_rows

        return cross_entropy_rows(logits, targets, needs_grad).sum()
    return _by_blocks(logits, targets, needs_grad, _rows(logits))


@_row_wise.register_fake
def _(logits: Tensor, targets: Tensor, needs_grad: bool) -> Tensor:
    return logits.new_empty((), dtype=torch.promote_types(logits.dtype, torch.float32))


def _rows(logits: Tensor) -> int:
    return CPU_ROWS if logits.device.type == "cpu" else OTHER_ROWS


def _has_kernel(logits: Tensor) -> bool:
    return logits.device.type == "cuda" and _kernel_works(logits.device, logits.dtype)


@cache
def _kernel_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether Triton can build the kernel, which needs a C compiler, and the kernel's results equal torch's."""
    if dtype == torch.float64:
        return False

    def check() -> None:
        from models.cross_entropy_kernel import cross_entropy_rows, gradient_of_rows, statistics_of_rows

        drawn = torch.linspace(-4.0, 4.0, 3 * 5000, device=device).view(3, 5000).to(dtype)
        targets = torch.tensor([1, IGNORED, 4999], device=device)
        logits, expected = drawn.clone(), drawn.clone()
        losses = _by_blocks(expected, targets, True, OTHER_ROWS), cross_entropy_rows(logits, targets, True).sum()
        torch.testing.assert_close(*losses, rtol=1e-3, atol=0.0)
        torch.testing.assert_close(logits[::2], expected[::2], rtol=2e-2, atol=1e-6)
        found = statistics_of_rows(drawn, targets)
        torch.testing.assert_close(found, _statistics_by_blocks(drawn, targets, OTHER_ROWS), rtol=1e-3, atol=1e-6)
        gradient_of_rows(drawn, targets, found[0], found[1])
        torch.testing.assert_close(drawn[::2], expected[::2], rtol=2e-2, atol=1e-6)

    return passes("cross entropy", check)


class _FusedCrossEntropy(torch.autograd.Function):
    """Computes the loss, and keeps tensors for the weight's gradient. Its backward handles hidden states and bias."""

    @staticmethod
    def forward(ctx, x, cast, targets, bias, needs_grad: bool, words: Any, loss: TokenCrossEntropy):
        logits, of_tokens = F.linear(x, cast, None if bias is None else bias.to(cast.dtype)), None
        if words is None and not loss.metrics:
            total = _row_wise(logits, targets, needs_grad)
        else:
            total, of_tokens = _by_statistics(logits, targets, needs_grad, words, loss)
        if not needs_grad:
            return total, of_tokens, None, None
        # Rows that do not count get no gradient. For the weight's gradient, zeros are written into x, which is smaller
        # than the logits.
        counted = (targets != IGNORED)[:, None]
        rows = x * counted
        ctx.save_for_backward(cast, logits, counted)
        ctx.mark_non_differentiable(logits, rows, *([] if of_tokens is None else [of_tokens]))
        ctx.set_materialize_grads(False)  # otherwise torch makes zeros of the size of the logits
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return total, of_tokens, logits, rows

    @staticmethod
    def backward(ctx, scale: Tensor, *_):
        cast, gradient, counted = ctx.saved_tensors
        x_dtype, bias_dtype = ctx.dtypes
        # The scale may be float16's loss scale (65,536 and up): applied after the products, in float32.
        grad_x = (gradient @ cast).to(scale.dtype).mul_(scale * counted).to(x_dtype)
        grad_bias = None
        if bias_dtype is not None:  # a product, because that adds up in float32
            shrunk, shrink = _shrunk(counted.to(gradient.dtype), len(counted))
            grad_bias = (shrunk.t() @ gradient)[0].to(bias_dtype).mul_(scale.to(bias_dtype) / shrink)
        return grad_x, None, None, grad_bias, None, None, None


class _CrossEntropyOfWeight(torch.autograd.Function):
    """Adds zero to the loss. Its backward computes the weight's gradient, at a later time in a split backward."""

    @staticmethod
    def forward(ctx, weight: Tensor, rows: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(rows, gradient)
        ctx.dtype = weight.dtype
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx, scale: Tensor):
        rows, gradient = ctx.saved_tensors
        shrunk, shrink = _shrunk(rows, len(rows))
        return (gradient.t() @ shrunk).to(ctx.dtype).mul_(scale.to(ctx.dtype) / shrink), None, None, None


def _shrunk(x: Tensor, rows: int) -> tuple[Tensor, Tensor | float]:
    """Return ``x`` times a power of two, and the power, such that ``g.t() @ x`` is finite in float16 for any |g| <= 1.

    With 64k rows the sum for a frequent word exceeds 65,504. A loss scale would not help, because it is applied after
    the product. The power follows from the largest element. It only costs the lowest bits of numbers below 2e-3.
    """
    if x.dtype != torch.float16:
        return x, 1.0
    bound = x.abs().amax().float() * rows
    shrink = torch.exp2(torch.floor(torch.log2(32768.0 / bound))).clamp(max=1.0)
    return x * shrink.to(x.dtype), shrink


def fused_cross_entropy(
    x: Tensor, weight: Tensor, cast: Tensor, targets: Tensor, bias: Tensor | None = None, words: Any = None, loss=PLAIN
) -> tuple[Tensor, ...]:
    """Compute the ``loss`` of ``x @ weight.T + bias`` against ``targets``, summed where they are not ``IGNORED``.

    ``x`` [n, c] is in the compute dtype. ``weight`` [v, c] is the parameter, which gets the gradient. ``cast`` [v, c]
    has the same numbers in the compute dtype (cast once per step by the caller). ``targets`` [n] are int64. ``bias`` is
    [v] or None. If ranks split the vocabulary, weight and bias belong to this rank's ``words``, and x gets a partial
    gradient. Returns the sum, and the sums of the loss's metrics.
    """
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias) if t is not None)
    total, of_tokens, gradient, rows = _FusedCrossEntropy.apply(x, cast, targets, bias, needs_grad, words, loss)
    if needs_grad:
        total = total + _CrossEntropyOfWeight.apply(weight, rows, gradient, total.detach())
    return total, *[of_tokens] * len(loss.metrics)


class FusedHead(nn.Module):
    """[b, t, c] -> logits [b, t, vocab_size], through the linear layer ``projection`` that a subclass sets.

    The head computes the loss, so that training never holds float32 logits.
    """

    projection: nn.Linear
    terms: TokenCrossEntropy = PLAIN  # the loss; ``Chain.with_loss`` sets another
    vocabulary: Any = None  # this rank's words if ranks split the vocabulary: parallel.axes.tensor.VocabularyShard

    def __init__(self) -> None:
        super().__init__()
        # The weight in the compute dtype, kept between micro-batches. The cache is a dict during a step, in which no
        # weight changes, and None outside of a step, so that no old weight is used. (The weight's version does not show
        # a change, because fused optimizers do not increment it.)
        self.step_cache: dict[tuple[torch.device, torch.dtype], Tensor] | None = None

    def hidden(self, x: Tensor) -> Tensor:
        """Return the input of the projection. A subclass may apply a norm here."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, c] -> logits [b, t, vocab_size]."""
        if self.vocabulary is None:
            return self.projection(self.hidden(x))
        return self.vocabulary.gather(self.projection(self.vocabulary.enter(self.hidden(x))))

    def loss(self, x: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        """Compute the loss of hidden states [b, t, c] against next tokens [b, t], in the autocast dtype."""
        targets = mask_targets(targets, weights).flatten()
        hidden = self.hidden(x)
        hidden = (hidden if self.vocabulary is None else self.vocabulary.enter(hidden)).flatten(0, 1)
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # torch knows no autocast for "meta"
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        linear, counted = self.projection, targets != IGNORED
        count = len(linear.weight) if self.vocabulary is None else self.vocabulary.count
        known = (targets >= 0) & (targets < count)
        assert_all(known | ~counted, f"targets must be from 0 to {count - 1}, or {IGNORED}, which is not counted")
        cast = self._weight_as(hidden.dtype)
        parts = hidden, linear.weight, cast, targets, linear.bias
        loss, *metrics = fused_cross_entropy(*parts, self.vocabulary, self.terms)
        return Sums(loss, counted.sum(), tuple(metrics))

    def _weight_as(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in the compute dtype. It is cast once per step and not once per micro-batch."""
        weight = self.projection.weight.detach()
        if weight.dtype == dtype:
            return weight
        if self.step_cache is None:
            return weight.to(dtype)
        key = weight.device, dtype  # copies of the module on other devices share the dict
        if key not in self.step_cache:
            self.step_cache[key] = weight.to(dtype)
        return self.step_cache[key]


class Head(FusedHead):
    """Final norm and projection onto the vocabulary, [b, t, c] -> logits [b, t, vocab_size]."""

    def __init__(self, norm: str, kind: Callable[[int], nn.Module], width: int, vocab_size: int) -> None:
        """The norm, of this ``kind``, is named ``norm``. The projection is named ``lm_head``, as in transformers."""
        super().__init__()
        self.add_module(norm, kind(width))
        self.lm_head, self._norm = nn.Linear(width, vocab_size, bias=False), norm

    @property
    def projection(self) -> nn.Linear:
        """The projection, which may be tied to the embedding."""
        return self.lm_head

    def hidden(self, x: Tensor) -> Tensor:
        """Apply the norm, [b, t, c] -> same."""
        return getattr(self, self._norm)(x)
