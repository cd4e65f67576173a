"""Cross entropy and its gradient in one Triton kernel on a GPU, which reads and writes the logits in memory once.

Each row is read twice, the second time from the cache. torch's operators make about ten passes over float32 logits for
the same result.

Source of the two loops: Liger Kernel (Hsu et al. 2024), ``cross_entropy.py``.
"""

# Triton is only installed with torch for GPUs, and its types only have the kernel's own arguments for a launch.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.losses import IGNORED

_BLOCK, _WARPS = 4096, 8


@triton.jit
def _sum(logits, words, block: tl.constexpr):
    """Return the largest logit of a row, and the sum of exp(logit - largest)."""
    largest = float("-inf")
    total = 0.0
    for start in range(0, words, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < words, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger))
        largest = larger
    return largest, total


@triton.jit
def _differentiate(logits, target, largest, total, words, block: tl.constexpr):
    """Replace the logits of a row by their gradient."""
    for start in range(0, words, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < words, other=float("-inf")).to(tl.float32)
        probability = tl.exp(x - largest) / total
        tl.store(logits + at, tl.where(at == target, probability - 1.0, probability), mask=at < words)


@triton.jit
def _row(logits, targets, losses, words, ignored: tl.constexpr, gradient: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * words
    target = tl.load(targets + row)
    largest, total = _sum(logits, words, block)
    if target == ignored:
        tl.store(losses + row, 0.0)
    else:
        tl.store(losses + row, largest + tl.log(total) - tl.load(logits + target).to(tl.float32))
    if gradient:
        tl.debug_barrier()  # the target's logit is read before another thread overwrites it
        _differentiate(logits, target, largest, total, words, block)


@triton.jit
def _row_statistics(logits, columns, found, rows, words, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * words
    column = tl.load(columns + row)
    largest, total = _sum(logits, words, block)
    tl.store(found + row, largest)
    tl.store(found + rows + row, total)
    of_target = tl.load(logits + column, mask=column >= 0, other=0.0).to(tl.float32)
    tl.store(found + 2 * rows + row, of_target)


@triton.jit
def _row_gradient(logits, columns, largest, total, words, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(columns + row)
    _differentiate(logits + row * words, column, tl.load(largest + row), tl.load(total + row), words, block)


def cross_entropy_rows(logits: Tensor, targets: Tensor, gradient: bool) -> Tensor:
    """Return the cross entropy of each row, [n] float32; 0 for rows that do not count.

    ``logits`` [n, v] in float32, bfloat16 or float16, contiguous, are overwritten by their gradient if ``gradient`` is
    true. A row that does not count then has undefined values. ``targets`` [n] are int64: classes below v, or
    ``IGNORED``.
    """
    rows, words = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        with torch.cuda.device_of(logits):  # Triton launches on the current GPU
            _row[(rows,)](logits, targets, losses, words, IGNORED, gradient, _BLOCK, num_warps=_WARPS)
    return losses


def statistics_of_rows(logits: Tensor, columns: Tensor) -> Tensor:
    """Return the largest logit of each row, its sum of exp(logit - largest), and its target's logit, [3, n] float32.

    ``logits`` [n, v] are as in ``cross_entropy_rows``. ``columns`` [n] are int64 classes below v. A row with a negative
    class has no target, and its third number is 0.
    """
    rows, words = logits.shape
    found = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        with torch.cuda.device_of(logits):
            _row_statistics[(rows,)](logits, columns, found, rows, words, _BLOCK, num_warps=_WARPS)
    return found


def gradient_of_rows(logits: Tensor, columns: Tensor, largest: Tensor, total: Tensor) -> None:
    """Replace ``logits`` by exp(logit - largest) / total, less 1 in each row's column; [n] float32, contiguous."""
    rows, words = logits.shape
    if rows:
        with torch.cuda.device_of(logits):
            _row_gradient[(rows,)](logits, columns, largest, total, words, _BLOCK, num_warps=_WARPS)
