"""Random numbers that depend on names, not on the rank that draws the numbers.

The numbers of a generator depend on the order of the calls, and a parallel layout changes this order. Here each use
seeds the generator by an identity: (seed, parameter name) for an initial weight, (seed, step, module name, sample) for
a dropout mask. Every layout then draws the same numbers.

Dropout by sample: torch draws one mask for a whole tensor, so a batch that is cut differently has other masks and
trains differently. Here a mask is a function of (seed, step, module name, number of the call, index of the sample in
the global batch). It is the same for every number of micro-batches, replicas and stages, and is drawn again in a
recomputation. In a chain every ``nn.Dropout``, ``nn.Dropout1d``, ``2d`` and ``3d`` works like this; outside of a chain
they are torch's own. A sample is a row of the tensor's first dimension, or several consecutive rows: [b t, c] has t
rows per sample.

The random bits of an element are a hash of its position, with the hash of SplitMix64 (Steele et al. 2014). On a CPU
this takes no longer than torch's generator, and it gives the same mask on every device.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.errors import ModelError, brief
from models import sequence

# The constants of a dropout mask, as int64: the distances of samples and of elements before hashing (the latter as in
# SplitMix64), and the factors of the hash.
HASH = SAMPLE, ELEMENT, FACTOR_1, FACTOR_2 = tuple(
    n - 2**64 for n in (0xD1342543DE82EF95, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# Elements per block. On a CPU two int64 numbers per element fit into the cache.
_CPU_BLOCK, _OTHER_BLOCK = 2**15, 2**22


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed from any integers and words; the same on every machine and Python version."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator for operators on ``device``."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.mps._get_default_mps_generator() if device.type == "mps" else torch.default_generator


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the default generators of the host and of ``device``. The generators of other devices do not change.

    The host's generator is seeded, too, because ``torch.rand(())``, which may decide whether a layer is skipped, draws
    from it. ``torch.manual_seed`` seeds every backend, which takes 60 times as long, for each layer of each
    micro-batch.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        default_generator(device).manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from ``seed`` on the CPU inside the block, and restore the generator's state after it.

    Only one thread computes: the numbers of a decomposition (``nn.init.orthogonal_``) depend on the number of threads.
    """
    state, threads = torch.default_generator.get_state(), torch.get_num_threads()
    torch.default_generator.manual_seed(seed)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.default_generator.set_state(state)


@dataclass
class Samples:
    """The samples in one forward of a layer.

    Attributes:
        count: The number of samples.
        first: The index of the first sample in the global batch.
        seed: The run's seed.
        step: The number of the step.
        notes: A list to which each dropout module appends (its name, shape of its input) without drawing. None to draw.
        documents: The documents in each sample (``models.sequence.documents``); None if each sample is one.
    """

    count: int
    first: int = 0
    seed: int = 0
    step: int = 0
    notes: list[tuple[str, tuple[int, ...]]] | None = None
    documents: Tensor | None = None
    _calls: dict[str, dict[int, int]] = field(default_factory=dict)

    def seed_of_call(self, module: str) -> int:
        """Return the seed of this call of a module. A layer may call the module more than once.

        If a layer recomputes a part of itself (``torch.utils.checkpoint``), it calls the module again, with the host's
        generator in the same state. Each call is therefore identified by the next number of this generator.
        """
        position = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        calls = self._calls.setdefault(module, {})
        return derive_seed(self.seed, self.step, module, calls.setdefault(position, len(calls)))


_forward = threading.local()  # .samples: the samples of the layer that this thread computes
_of_seed: dict[int, Samples] = {}  # by the seed of the host's generator, which a layer's own recomputation restores


@contextmanager
def computing(samples: Samples, seed: int | None = None) -> Iterator[None]:
    """Set the samples that a layer computes inside the block.

    The backward finds the samples by the seed of the host's generator, until ``forget``.
    """
    before, _forward.samples = getattr(_forward, "samples", None), samples
    if seed is not None:
        _of_seed[seed] = samples
    try:
        with sequence.computing_documents(samples.documents, seed):
            yield
    finally:
        _forward.samples = before


def forget() -> None:
    """Forget what ``computing`` has set. Called after the backward."""
    _of_seed.clear()
    sequence.forget()


def samples_of(x: Tensor) -> Samples | None:
    """Return the samples in the rows of ``x``; None outside a training step, or if the rows are not samples."""
    samples = getattr(_forward, "samples", None)
    if samples is None:
        samples = _of_seed.get(torch.default_generator.initial_seed())
    if samples is None or x.dim() == 0 or x.shape[0] % samples.count:
        return None
    return samples


class Part(NamedTuple):
    """A part of a mask along one dimension: ``indices``, int64 or a range, of the ``size`` indices of the whole."""

    indices: Tensor | range
    size: int

    def at(self, places: Tensor) -> Tensor:
        """Return the indices in the whole at some places of the part."""
        if isinstance(self.indices, range):
            return places + self.indices.start
        return self.indices.to(places.device)[places]


Parts = Mapping[int, Part]  # by the dimension of the mask of a sample; dimension 0 is the rows of a sample


class Drawn(NamedTuple):
    """The mask of one call of a dropout module. Any block of it can be made, in any order and repeatedly.

    Attributes:
        seed: The seed of the call.
        first: The index of the first sample.
        count: The number of samples.
        p: The probability with which an element is dropped.
        parts: The part of this rank, if ranks divide the layer.
    """

    seed: int
    first: int
    count: int
    p: float
    parts: Parts

    def mask(self, like: Tensor, parts: Parts) -> Tensor:
        """Return a block of the mask, [b, ...]: 0 for dropped elements and 1 / (1 - p) for kept elements.

        Args:
            like: The mask is like this tensor, whose values do not matter.
            parts: The block within this rank's part. It is whole along dimensions that are not given.
        """
        return _mask(torch.empty_like(like, memory_format=torch.contiguous_format), *self[:4], (parts, self.parts))


class BySample(nn.modules.dropout._DropoutNd):
    """Dropout by sample. The classes below combine it with torch's dropout classes.

    Attributes:
        full_name: The module's name in the whole chain.
        spread: The first dimension along which all elements have the same random number; None if each has its own.
        part: (shape of a mask, number of samples) -> this rank's part of the whole mask. None if no layer is divided.
    """

    full_name = ""
    part: Callable[[Sequence[int], int], Parts] | None = None
    spread: int | None = 2

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
            return x * (1.0 if in_kernel else x.new_empty(shape))  # keeps as much for the backward as a mask does
        drawn = self._drawn(samples, shape)
        levels = drawn.parts, self._part_of_sequence(x.shape, drawn)
        if in_kernel and not any(levels) and _kernel_works(x.device):
            return _InKernel.apply(x, *drawn[:4])
        mask = _mask(x.new_empty(shape), *drawn[:4], levels)
        return x.mul_(mask) if self.inplace else x * mask

    def _drawn(self, samples: Samples, shape: Sequence[int]) -> Drawn:
        parts = {} if self.part is None else self.part(shape, samples.count)
        return Drawn(samples.seed_of_call(self.full_name), samples.first, samples.count, self.p, parts)

    def _part_of_sequence(self, shape: Sequence[int], drawn: Drawn) -> Parts:
        """Return the positions of this process's tokens in the mask of the whole sequence; empty if they are all.

        Tokens are the rows of a sample, [b t, ...], or dimension 1, [b, t, ...], or dimension 2 of heads [b, h, t, c].
        """
        here = sequence.part()
        if here is None:
            return {}
        sizes = dict(enumerate((shape[0] // drawn.count, *shape[1:])))
        sizes |= {dim: part.size for dim, part in drawn.parts.items()}
        order = (0, 2, 1) if len(shape) == 4 else (0, 1)
        dims = [dim for dim in order if sizes.get(dim) == len(here.positions)]
        if not dims:
            raise ModelError(
                f"the dropout {self.full_name} gets {tuple(shape)}, and no dimension of this is the "
                f"{len(here.positions)} positions that this process computes of each sequence of {here.length}"
            )
        if self.spread is not None and dims[0] >= self.spread:  # one number is for all positions
            return {}
        return {dims[0]: Part(here.positions, here.length)}


class Dropout(BySample, nn.Dropout):
    """``nn.Dropout`` by sample."""

    spread = None

    def draw(self, x: Tensor) -> Drawn | None:
        """Return the mask of this call for blocks of probabilities; None if nothing is dropped.

        The mask itself is made block by block. Call this once per forward, not again in the backward.

        Args:
            x: [b, ...]. Its first dimension are the samples, and its second dimension, if it has four, are the heads.

        Raises:
            ModelError: If the samples are unknown, because ``x`` is none of a step or has other rows.
        """
        if not self.training or self.p == 0.0:
            return None
        samples = samples_of(x)
        if samples is None:
            raise ModelError(f"the dropout {self.full_name} gets {tuple(x.shape)}, whose rows are no samples of a step")
        if samples.notes is not None:
            samples.notes.append((self.full_name, tuple(x.shape)))
            return None
        return self._drawn(samples, x.shape)


class Dropout1d(BySample, nn.Dropout1d):
    """``nn.Dropout1d`` by sample: [b, c, l], whole channels."""


class Dropout2d(BySample, nn.Dropout2d):
    """``nn.Dropout2d`` by sample: [b, c, h, w], whole channels."""


class Dropout3d(BySample, nn.Dropout3d):
    """``nn.Dropout3d`` by sample: [b, c, d, h, w], whole channels."""


_OURS = {nn.Dropout: Dropout, nn.Dropout1d: Dropout1d, nn.Dropout2d: Dropout2d, nn.Dropout3d: Dropout3d}


def by_sample(name: str, layer: nn.Module) -> nn.Module:
    """Turn the dropout of a layer into dropout by sample, in place. Set ``full_name`` of the modules that have it."""
    for full_name, module in layer.named_modules(prefix=name):
        module.__class__ = _OURS.get(type(module), type(module))
        if hasattr(module, "full_name"):
            module.full_name = full_name  # pyright: ignore[reportArgumentType]  # its stub knows tensors only
    return layer


def _threshold(p: float) -> int:
    """Return the smallest int64 value of the random bits that are kept, with probability 1 - ``p``."""
    return min(int((p - 0.5) * 2**64), 2**63 - 1)


def _mask(mask: Tensor, seed: int, first: int, count: int, p: float, levels: Sequence[Parts] = ()) -> Tensor:
    """Fill a contiguous ``mask`` [count r, ...] with 0 for dropped elements and 1 / (1 - p) for kept elements.

    The mask is a part of a part ... of the whole mask. ``levels`` has these parts from the smallest to the largest.
    """
    rows = mask.view(count, -1)
    size, device = rows.shape[1], mask.device
    starts = torch.arange(first, first + count, device=device).mul_(SAMPLE).add_(seed)[:, None]
    steps = _places((len(mask) // count, *mask.shape[1:]), levels, device) if any(levels) else None
    steps = (torch.arange(size, device=device) if steps is None else steps).mul_(ELEMENT)
    each = max(1, (_CPU_BLOCK if device.type == "cpu" else _OTHER_BLOCK) // max(size, 1))
    for i in range(0, count, each):
        rows[i : i + each] = _mixed(starts[i : i + each] + steps) >= _threshold(p)
    return mask.mul_(1.0 / (1.0 - p)) if p < 1.0 else mask.zero_()


def _places(shape: Sequence[int], levels: Sequence[Parts], device: torch.device) -> Tensor:
    """Return the place of each element of a part in the whole mask of a sample, [elements] int64."""
    places = torch.zeros(1, dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        along = torch.arange(size, device=device)
        for part in (parts[dim] for parts in levels if dim in parts):
            along, size = part.at(along), part.size
        places = (places[:, None] * size + along).flatten()
    return places


def _mixed(z: Tensor) -> Tensor:
    """Hash as SplitMix64 does, but without the last shift, which does not change the high bits. Overwrites ``z``."""
    shifted = (z >> 30).bitwise_and_(2**34 - 1)
    z.bitwise_xor_(shifted).mul_(FACTOR_1)
    torch.bitwise_right_shift(z, 27, out=shifted).bitwise_and_(2**37 - 1)
    return z.bitwise_xor_(shifted).mul_(FACTOR_2)


class _InKernel(torch.autograd.Function):
    """Dropout in one kernel. The backward draws the mask again, so nothing is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, seed: int, first: int, count: int, p: float) -> Tensor:
        from models.dropout_kernel import drop_out

        ctx.drawn = seed, first, count, p
        return drop_out(x, *ctx.drawn, _threshold(p), HASH)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _InKernel.apply(dy, *ctx.drawn), None, None, None, None


@cache
def _kernel_works(device: torch.device) -> bool:
    """Return whether Triton can build the kernel, and the kernel drops the right elements."""

    def check() -> None:
        ones = torch.ones(4, 5003, device=device)
        drawn = 2**62 + 1, 7, 4, 0.25
        torch.testing.assert_close(_InKernel.apply(ones, *drawn), _mask(ones.clone(), *drawn))

    return passes("dropout", check)


def passes(what: str, check: Callable[[], None]) -> bool:
    """Return whether a Triton kernel passes a check. Warn if Triton is installed and the check fails."""
    try:
        check()
    except ImportError:
        return False
    except Exception as error:  # of Triton, the compiler or the driver
        warnings.warn(f"{what} is computed without its Triton kernel, which is slower: {brief(error)}", stacklevel=3)
        return False
    return True
