"""Cross entropy and its gradient on a GPU in one Triton kernel, which reads and writes logits in memory once.

Each row is read twice, the second time from the cache. torch's operators make about ten passes over logits in float32
for the same result.

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
def _row(logits, targets, losses, words, ignored: tl.constexpr, gradient: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * words
    target = tl.load(targets + row)
    largest = float("-inf")
    total = 0.0  # of exp(x - largest)
    for start in range(0, words, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < words, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger))
        largest = larger
    if target == ignored:
        tl.store(losses + row, 0.0)
    else:
        tl.store(losses + row, largest + tl.log(total) - tl.load(logits + target).to(tl.float32))
    if gradient:
        tl.debug_barrier()  # the target's logit is read before another thread overwrites it
        for start in range(0, words, block):
            at = start + tl.arange(0, block)
            x = tl.load(logits + at, mask=at < words, other=float("-inf")).to(tl.float32)
            probability = tl.exp(x - largest) / total
            tl.store(logits + at, tl.where(at == target, probability - 1.0, probability), mask=at < words)


def cross_entropy_rows(logits: Tensor, targets: Tensor, gradient: bool) -> Tensor:
    """Return the cross entropy of each row, [n] float32; 0 for rows that do not count.

    ``logits`` [n, v] in float32, bfloat16 or float16, contiguous, are overwritten by their gradient if ``gradient`` is
    true; a row that does not count then has undefined values. ``targets`` [n] are int64 classes below v, or
    ``IGNORED``.
    """
    rows, words = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        with torch.cuda.device_of(logits):  # Triton launches on the current GPU
            _row[(rows,)](logits, targets, losses, words, IGNORED, gradient, _BLOCK, num_warps=_WARPS)
    return losses
