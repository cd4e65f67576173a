"""Operators that torch has for CUDA alone, in plain ones: for pretend GPUs (``pretend_cuda``).

The arithmetic is that of aten/src/ATen/native/cuda/Normalization.cuh: an inverse standard deviation where others have a
variance, and sums of dy times (x - mean) that are not normalised.
"""

from __future__ import annotations

import torch

_installed: list = []  # implementations end when their Library is deleted


def install() -> None:
    """Give them to the CUDA of this process."""
    library = torch.library.Library("aten", "IMPL")
    for function in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        library.impl(f"batch_norm_{function.__name__}", function, "CUDA")
    _installed.append(library)


def stats(x, eps):
    variance, mean = torch.var_mean(x.to(_wide(x)), _dims(x), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats_with_counts(x, means, scales, running_mean, running_var, momentum, eps, counts):
    counts = counts[:, None]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    squares = ((scales**-2 - eps + (means - mean) ** 2) * counts).sum(0)
    running_mean.copy_((1 - momentum) * running_mean + momentum * mean)
    running_var.copy_((1 - momentum) * running_var + momentum * squares / (total - 1))
    return mean, (squares / total + eps).rsqrt()


def elemt(x, weight, bias, mean, scale, eps):
    y = (x - _spread(mean, x)) * _spread(scale * weight, x) + _spread(bias, x)
    return y.to(x.dtype)


def backward_reduce(dy, x, mean, scale, weight, of_input, of_weight, of_bias):
    dy = dy.to(_wide(dy))
    sum_dy = dy.sum(_dims(x))
    sum_dy_centred = (dy * (x - _spread(mean, x))).sum(_dims(x))
    return sum_dy, sum_dy_centred, sum_dy_centred * scale, sum_dy.clone()


def backward_elemt(dy, x, mean, scale, weight, sum_dy, sum_dy_centred, counts):
    assert counts.dtype == torch.int32
    total = counts.sum()
    centred = (x - _spread(mean, x)) * _spread(scale**2 * sum_dy_centred / total, x)
    return ((dy - _spread(sum_dy / total, x) - centred) * _spread(scale * weight, x)).to(x.dtype)


def _wide(x):
    return torch.promote_types(x.dtype, torch.float32)


def _dims(x):
    return [d for d in range(x.dim()) if d != 1]


def _spread(of_channels, x):
    return of_channels.view(1, -1, *[1] * (x.dim() - 2))
