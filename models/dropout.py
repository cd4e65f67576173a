"""Dropout by sample: what is dropped out of a sample depends on nothing that is computed with it.

torch draws one mask for a whole tensor, so a batch that is cut otherwise has other masks, and trains otherwise. Here a
mask is a function of (seed, step, name of the module, which call of it, the sample's index in the global batch): the
same for every number of micro-batches, replicas and stages, and drawn again in a recomputation. In a chain every
``nn.Dropout``, ``nn.Dropout1d``, ``2d`` and ``3d`` works like this; outside of one they are torch's own.

A sample is a row of the tensor's first dimension, or several consecutive rows: [b t, c] has t of each.

The random bits of an element are a hash of its position, that of SplitMix64 (Steele et al. 2014). That takes no
longer than torch's generator takes on a CPU, and gives the same mask on every device.
"""

from __future__ import annotations

import math
import warnings
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.seeds import ELEMENT, FACTOR_1, FACTOR_2, SAMPLE, default_generator, derive_seed, samples_of, threshold


class BySample:
    """Dropout by sample, which the classes below combine with torch's own.

    Attributes:
        full_name: The module's name in the whole chain.
        spread: The first dimension along which all elements share what is drawn; None: each has its own.
    """

    full_name = ""
    spread: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[b, ...] -> same."""
        if not self.training or self.p == 0.0:
            return x
        samples = samples_of(x)
        if samples is None or (self.spread is not None and x.dim() <= self.spread):
            return super().forward(x)
        in_kernel = self.spread is None and not self.inplace and x.device.type == "cuda"
        shape = x.shape if self.spread is None else (*x.shape[: self.spread], *[1] * (x.dim() - self.spread))
        if samples.notes is not None:
            samples.notes.append((self.full_name, tuple(x.shape)))
            return x * (1.0 if in_kernel else x.new_empty(shape))  # and as much is kept for the backward
        seed = samples.seed_of_call(self.full_name)
        if in_kernel and _kernel_works(x.device):
            return _InKernel.apply(x, seed, samples.first, samples.count, self.p)
        mask = _mask(x.new_empty(shape), seed, samples.first, samples.count, self.p)
        return x.mul_(mask) if self.inplace else x * mask


class Dropout(BySample, nn.Dropout):
    """``nn.Dropout`` by sample."""


class Dropout1d(BySample, nn.Dropout1d):
    """``nn.Dropout1d`` by sample: [b, c, l], whole channels."""

    spread = 2


class Dropout2d(BySample, nn.Dropout2d):
    """``nn.Dropout2d`` by sample: [b, c, h, w], whole channels."""

    spread = 2


class Dropout3d(BySample, nn.Dropout3d):
    """``nn.Dropout3d`` by sample: [b, c, d, h, w], whole channels."""

    spread = 2


class CausalAttentionDropout(Dropout):
    """Causal attention that drops out probabilities, by sample."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[b, heads, t, width] each -> same."""
        if not self.training or self.p == 0.0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        samples = samples_of(q)
        if samples is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        if q.device.type == "cuda":  # the kernel draws: one call for each sample
            if samples.notes is not None:
                samples.notes.append((self.full_name, tuple(q.shape)))
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            generator, each, outputs = default_generator(q.device), len(q) // samples.count, []
            seed = samples.seed_of_call(self.full_name)
            for i, one in enumerate(zip(*(x.split(each) for x in (q, k, v)), strict=True)):
                generator.manual_seed(derive_seed(seed, samples.first + i))
                outputs.append(F.scaled_dot_product_attention(*one, dropout_p=self.p, is_causal=True))
            return torch.cat(outputs)
        unseen = torch.full((q.shape[2], k.shape[2]), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        scores = torch.baddbmm(
            unseen, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=1 / math.sqrt(q.shape[3])
        )
        exact = torch.promote_types(scores.dtype, torch.float32)
        probabilities = scores.softmax(dim=-1, dtype=exact).to(v.dtype).view(*q.shape[:3], -1)
        return super().forward(probabilities) @ v


_OURS = {nn.Dropout: Dropout, nn.Dropout1d: Dropout1d, nn.Dropout2d: Dropout2d, nn.Dropout3d: Dropout3d}


def by_sample(name: str, layer: nn.Module) -> nn.Module:
    """Make the dropout of a layer dropout by sample, in place, and tell each module its name."""
    for full_name, module in layer.named_modules(prefix=name):
        ours = next((ours for theirs, ours in _OURS.items() if type(module).forward is theirs.forward), None)
        if ours is not None:
            module.__class__ = _derived(ours, type(module))
        if isinstance(module, BySample):
            module.full_name = full_name
    return layer


@cache
def _derived(ours: type, theirs: type) -> type:
    return ours if theirs in _OURS else type(theirs.__name__, (ours, theirs), {})


# Elements to a block. CPU: two int64 of each are in the cache.
_CPU_BLOCK, _OTHER_BLOCK = 2**15, 2**22


def _mask(mask: Tensor, seed: int, first: int, count: int, p: float) -> Tensor:
    """Fill ``mask``, [count r, ...] and contiguous: 0 for what is dropped out, else 1 / (1 - p)."""
    rows = mask.view(count, -1)
    size, device = rows.shape[1], mask.device
    starts = torch.arange(first, first + count, device=device).mul_(SAMPLE).add_(seed)[:, None]
    steps = torch.arange(size, device=device).mul_(ELEMENT)
    each = max(1, (_CPU_BLOCK if device.type == "cpu" else _OTHER_BLOCK) // max(size, 1))
    for i in range(0, count, each):
        rows[i : i + each] = _mixed(starts[i : i + each] + steps) >= threshold(p)
    return mask.mul_(1.0 / (1.0 - p)) if p < 1.0 else mask.zero_()


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's finaliser without its last shift, which the high bits do not see. ``z`` is overwritten."""
    shifted = (z >> 30).bitwise_and_(2**34 - 1)
    z.bitwise_xor_(shifted).mul_(FACTOR_1)
    torch.bitwise_right_shift(z, 27, out=shifted).bitwise_and_(2**37 - 1)
    return z.bitwise_xor_(shifted).mul_(FACTOR_2)


class _InKernel(torch.autograd.Function):
    """In one kernel, which draws the mask again for the backward: nothing is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, seed: int, first: int, count: int, p: float) -> Tensor:
        from models.dropout_kernel import drop_out

        ctx.drawn = seed, first, count, p
        return drop_out(x, *ctx.drawn)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _InKernel.apply(dy, *ctx.drawn), None, None, None, None


@cache
def _kernel_works(device: torch.device) -> bool:
    """Return whether Triton can build the kernel here, and it drops out what it should."""
    try:
        from models.dropout_kernel import drop_out

        ones = torch.ones(4, 5003, device=device)
        torch.testing.assert_close(drop_out(ones, 2**62 + 1, 7, 4, 0.25), _mask(ones.clone(), 2**62 + 1, 7, 4, 0.25))
    except Exception as error:  # of Triton's, the compiler's, the driver's
        if not isinstance(error, ImportError):
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.warn(f"dropout without its Triton kernel, which is slower: {reason}", stacklevel=2)
        return False
    return True
