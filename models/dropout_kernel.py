"""Dropout by sample in one Triton kernel on a GPU. It gives the same result as ``models.seeds`` and keeps no mask."""

# Triton is only installed with torch for GPUs, and its types only have the kernel's own arguments for a launch.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 1024, 4


@triton.jit(do_not_specialize=["seed", "first", "least"])
def _drop_out(
    x, y, seed, first, least, size, blocks, scale, of_sample, of_element, factor_1, factor_2, block: tl.constexpr
):
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * block + tl.arange(0, block)
    bits = seed + (first + sample) * of_sample + at * of_element
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * factor_1
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * factor_2
    factor = tl.where(bits >= least, scale, 0.0)
    x += sample * size
    y += sample * size
    tl.store(y + at, tl.load(x + at, mask=at < size, other=0.0) * factor, mask=at < size)


def drop_out(x: Tensor, seed: int, first: int, count: int, p: float, least: int, hashing: tuple[int, ...]) -> Tensor:
    """Drop out elements of ``x`` with probability p, and divide the remaining elements by 1 - p.

    ``x`` is [count r, ...]: r rows of each of ``count`` samples. ``first`` is the index of the first sample in the
    global batch. ``seed`` is the seed of this call. An element is kept if its random bits are at least ``least``.
    ``hashing`` has the constants that make the bits (``models.seeds.HASH``).
    """
    dense = x.contiguous()
    y = torch.empty_like(dense)
    if x.numel():
        size = x.numel() // count
        blocks = triton.cdiv(size, _BLOCK)
        scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
        with torch.cuda.device_of(x):  # Triton launches on the current GPU
            _drop_out[(count * blocks,)](
                dense, y, seed, first, least, size, blocks, scale, *hashing, _BLOCK, num_warps=_WARPS
            )
    return y if dense is x else torch.empty_like(x).copy_(y)
