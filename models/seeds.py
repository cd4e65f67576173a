"""Random numbers that depend on names, not on who draws them.

A generator that runs on from call to call ties every number to the order of the calls, and the order is what
a parallel layout changes. Here each use seeds the generator from what it *is*: (seed, parameter name) for an
initial weight, (seed, step, module name, sample) for a dropout mask. Any layout then draws the same.

Dropout by sample: torch draws one mask for a whole tensor, so a batch that is cut otherwise has other masks, and trains
otherwise. Here a mask is a function of (seed, step, name of the module, which call of it, the sample's index in the
global batch): the same for every number of micro-batches, replicas and stages, and drawn again in a recomputation. In a
chain every ``nn.Dropout``, ``nn.Dropout1d``, ``2d`` and ``3d`` works like this; outside of one they are torch's own. A
sample is a row of the tensor's first dimension, or several consecutive rows: [b t, c] has t of each.

The random bits of an element are a hash of its position, that of SplitMix64 (Steele et al. 2014). That takes no
longer than torch's generator takes on a CPU, and gives the same mask on every device.
"""

from __future__ import annotations

import hashlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A dropout mask, as int64: how far apart samples and elements are before they are hashed (the latter as in SplitMix64),
# and the factors of the hash.
HASH = SAMPLE, ELEMENT, FACTOR_1, FACTOR_2 = tuple(
    n - 2**64 for n in (0xD1342543DE82EF95, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# Elements to a block. CPU: two int64 of each are in the cache.
_CPU_BLOCK, _OTHER_BLOCK = 2**15, 2**22


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed from any integers and words; the same on every machine and Python version."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operators on ``device`` draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.mps._get_default_mps_generator() if device.type == "mps" else torch.default_generator


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the default generators of the host and of ``device``, and of no other device.

    The host's too: ``torch.rand(())``, which decides whether a layer is left out, draws there. ``torch.manual_seed``
    seeds every backend there is, which takes 60 times as long, for each layer of each micro-batch.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        default_generator(device).manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from ``seed`` on the CPU inside the block, and leave the generator as it was found."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


@dataclass
class Samples:
    """The samples of one forward of a layer.

    Attributes:
        count: The number of samples.
        first: The first one's index in the global batch.
        seed: The run's seed.
        step: The number of the step.
        notes: Where it is a list, each dropout adds (module, shape of its input) to it, and draws nothing.
    """

    count: int
    first: int = 0
    seed: int = 0
    step: int = 0
    notes: list[tuple[str, tuple[int, ...]]] | None = None
    _calls: dict[str, dict[int, int]] = field(default_factory=dict)

    def seed_of_call(self, module: str) -> int:
        """Return the seed of this call of a module that a layer may call more than once.

        A layer that recomputes a part of itself (``torch.utils.checkpoint``) calls it again, with the host's random
        numbers where they were. So each call is identified by the next of these numbers.
        """
        position = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        calls = self._calls.setdefault(module, {})
        return derive_seed(self.seed, self.step, module, calls.setdefault(position, len(calls)))


_forward = threading.local()  # .samples: of the layer that this thread computes
_of_seed: dict[int, Samples] = {}  # by the seed of the host's generator, which a layer's own recomputation restores


@contextmanager
def computing(samples: Samples, seed: int | None = None) -> Iterator[None]:
    """Say which samples a layer computes inside the block.

    The backward finds them by the seed that the host's generator was given for them, until ``forget``.
    """
    before, _forward.samples = getattr(_forward, "samples", None), samples
    if seed is not None:
        _of_seed[seed] = samples
    try:
        yield
    finally:
        _forward.samples = before


def forget() -> None:
    """End what ``computing`` has said: the backward is done."""
    _of_seed.clear()


def samples_of(x: Tensor) -> Samples | None:
    """Return the samples in the rows of ``x``; None outside of a training step, and where they are not in its rows."""
    samples = getattr(_forward, "samples", None)
    if samples is None:
        samples = _of_seed.get(torch.default_generator.initial_seed())
    if samples is None or x.dim() == 0 or x.shape[0] % samples.count:
        return None
    return samples


class BySample(nn.modules.dropout._DropoutNd):
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
        module.__class__ = _OURS.get(type(module), type(module))
        if isinstance(module, BySample):
            module.full_name = full_name
    return layer


def _threshold(p: float) -> int:
    """Return what int64 random bits are at least with probability 1 - ``p``."""
    return min(int((p - 0.5) * 2**64), 2**63 - 1)


def _mask(mask: Tensor, seed: int, first: int, count: int, p: float) -> Tensor:
    """Fill ``mask``, [count r, ...] and contiguous: 0 for what is dropped out, else 1 / (1 - p)."""
    rows = mask.view(count, -1)
    size, device = rows.shape[1], mask.device
    starts = torch.arange(first, first + count, device=device).mul_(SAMPLE).add_(seed)[:, None]
    steps = torch.arange(size, device=device).mul_(ELEMENT)
    each = max(1, (_CPU_BLOCK if device.type == "cpu" else _OTHER_BLOCK) // max(size, 1))
    for i in range(0, count, each):
        rows[i : i + each] = _mixed(starts[i : i + each] + steps) >= _threshold(p)
    return mask.mul_(1.0 / (1.0 - p)) if p < 1.0 else mask.zero_()


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's finaliser without its last shift, which the high bits do not see. ``z`` is overwritten."""
    shifted = (z >> 30).bitwise_and_(2**34 - 1)
    z.bitwise_xor_(shifted).mul_(FACTOR_1)
    torch.bitwise_right_shift(z, 27, out=shifted).bitwise_and_(2**37 - 1)
    return z.bitwise_xor_(shifted).mul_(FACTOR_2)


def _in_kernel(x: Tensor, seed: int, first: int, count: int, p: float) -> Tensor:
    from models.dropout_kernel import drop_out

    return drop_out(x, seed, first, count, p, _threshold(p), HASH)


class _InKernel(torch.autograd.Function):
    """In one kernel, which draws the mask again for the backward: nothing is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, seed: int, first: int, count: int, p: float) -> Tensor:
        ctx.drawn = seed, first, count, p
        return _in_kernel(x, *ctx.drawn)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _InKernel.apply(dy, *ctx.drawn), None, None, None, None


@cache
def _kernel_works(device: torch.device) -> bool:
    """Return whether Triton can build the kernel here, and it drops out what it should."""

    def check() -> None:
        ones = torch.ones(4, 5003, device=device)
        torch.testing.assert_close(_in_kernel(ones, 2**62 + 1, 7, 4, 0.25), _mask(ones.clone(), 2**62 + 1, 7, 4, 0.25))

    return works("dropout", check)


def works(what: str, check: Callable[[], None]) -> bool:
    """Return whether a Triton kernel passes a check; warn where it is there and does not."""
    try:
        check()
    except ImportError:
        return False
    except Exception as error:  # of Triton's, the compiler's, the driver's
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"{what} without its Triton kernel, which is slower: {reason}", stacklevel=3)
        return False
    return True
