"""Random numbers that depend on names, not on who draws them.

A generator that runs on from call to call ties every number to the order of the calls, and the order is what
a parallel layout changes. Here each use seeds the generator from what it *is*: (seed, parameter name) for an
initial weight, (seed, step, module name, sample) for a dropout mask. Any layout then draws the same.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Constants of a dropout mask (``models.dropout``), as int64: how far apart samples and elements are before they are
# hashed (the latter as in SplitMix64), and the factors of the hash.
SAMPLE, ELEMENT, FACTOR_1, FACTOR_2 = (
    n - 2**64 for n in (0xD1342543DE82EF95, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def threshold(p: float) -> int:
    """Return what int64 random bits are at least with probability 1 - ``p``."""
    return min(int((p - 0.5) * 2**64), 2**63 - 1)


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

    The host's too, whatever the device: ``torch.rand(())``, which decides whether a layer is left out, draws there.
    ``torch.manual_seed`` seeds every backend there is and costs 92 microseconds; this costs 1.4 for each, and it is
    called for each layer of each micro-batch.
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
