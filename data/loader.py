"""The samples of each batch of training and evaluation.

A shuffle needs no list. Samples of similar length share a batch, padded to one of few fixed shapes.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from common.errors import DataError
from data.dataset import Batch, Rows, Source
from data.read_ahead import read_ahead, read_in_processes

_ROUNDS = 8
# Samples are sorted by length within this many global batches. A larger window pads less, and shuffles less.
WINDOW = 50
_SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)


def permute(indices: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """Return the images of indices in the permutation of range(n) that a key selects.

    Only integers are computed, so the result is the same on every machine. The memory does not depend on n, only on the
    number of indices. A Feistel network permutes the smallest 4**h >= n numbers; a result outside range(n) is permuted
    again until it is inside ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Args:
        indices: Integers in [0, n), of any shape.
        n: From 1 to 2**62.
        key: Any integers. Another key gives another permutation.

    Returns:
        int64 of the shape of ``indices``. Over all of range(n), every number occurs exactly once.
    """
    indices = np.asarray(indices, dtype=np.int64)
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    # One 64-bit key per round, from a hash of the key's decimal digits (any size and sign of integer).
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8 * _ROUNDS).digest()
    round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    values = _feistel(indices.reshape(-1).astype(np.uint64), half_bits, round_keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _feistel(values[outside], half_bits, round_keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64).reshape(indices.shape)


def _feistel(values: np.ndarray, half_bits: int, round_keys: np.ndarray) -> np.ndarray:
    """Permute range(4**half_bits): each round xors a hash of one half onto the other, which is invertible.

    The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit.
    """
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        x = right ^ round_key
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((x ^ (x >> np.uint64(31))) & mask)
    return (left << shift) | right


def bucket_widths(longest: int) -> tuple[int, ...]:
    """Return the widths to which batches are padded: ``longest``, and 1, 2, 3, 4 and 6 eighths of it.

    The eighths are rounded up to multiples of 8.
    """
    rounded = {-(-int(longest * share) // 8) * 8 for share in _SHARES}
    return (*sorted(width for width in rounded if 0 < width < longest), longest)


class VariableLength(Source):
    """A source that can pad its batches to one of a few widths.

    Attributes:
        widths: The widths in ascending order. Every sample fits into the last.
    """

    widths: tuple[int, ...]

    @abstractmethod
    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of positions that each sample fills, at most widths[-1], in the shape of ``indices``."""

    @abstractmethod
    def read(self, indices: np.ndarray, epoch: int, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Return samples as Source.read does, padded to [b, width]; None for the last of ``widths``."""


class Joined(Source):
    """The samples of several sources, one source after the other. Evaluations give the results of each, too.

    Attributes:
        parts: {name: source}.
        lengths: The number of samples of each, int64 [parts].
    """

    def __init__(self, parts: Mapping[str, Source]):
        self.parts, self.lengths = parts, np.array([len(source) for source in parts.values()], np.int64)

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def read(self, indices: np.ndarray, epoch: int) -> Rows:
        """See Source."""
        parts, rows = self._places(indices)
        return self.read_rows(parts, rows, np.full(len(indices), epoch))

    def ids(self, indices: np.ndarray) -> list:
        """Return the name of each sample's part with the id, or else the number, that the sample has there."""
        pairs = [([*self.parts.items()][part], row) for part, row in zip(*self._places(indices), strict=True)]
        return [f"{name}/{(source.ids(np.array([row])) or [row])[0]}" for (name, source), row in pairs]

    def _places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each sample, and its number there."""
        ends = np.cumsum(self.lengths)
        parts = np.searchsorted(ends, indices, side="right")
        return parts, indices - (ends - self.lengths)[parts]

    def read_rows(self, parts: np.ndarray, rows: np.ndarray, epochs: np.ndarray, seed: int | None = None) -> Rows:
        """Read a row of a part in an epoch for each of ``parts``, int64 [b]; with a seed, each epoch is shuffled."""
        sources, pieces, places = [*self.parts.values()], [], []
        for part, epoch in np.unique(np.stack([parts, epochs], axis=1), axis=0).tolist():
            places.append(np.flatnonzero((parts == part) & (epochs == epoch)))
            mine = rows[places[-1]]
            mine = mine if seed is None else permute(mine, len(sources[part]), (seed, part, epoch))
            pieces.append(sources[part].read(mine, epoch))
        back = torch.from_numpy(np.argsort(np.concatenate(places)))

        def joined(*several: Any) -> Any:
            if not isinstance(several[0], Tensor):
                return tuple(map(joined, *several))
            whole = torch.cat(several)
            return whole[back] if len(whole) == len(back) else whole  # whose length is an error

        return joined(*pieces)


class Steps:
    """The batches of consecutive steps with one global batch size, for samples of fixed length.

    An epoch permutes the samples, unless the source is ordered, and its steps use them in turn. This is a pure function
    of (seed, epoch, step) that does not depend on replicas.

    Attributes:
        source: The samples.
        size: The samples of a step, over all replicas.
        done: The last step that had another size; 0 if there is none.
        epoch: The epoch of the next step.
        row: The number of samples of that epoch that earlier steps used.
    """

    def __init__(self, source: Source, size: int, seed: int, before: Steps | None = None, done: int = 0):
        """Continue after the step ``done``, the last one of ``before``, with the next sample of the epoch."""
        self.source, self.size, self.seed, self.done, self._before = source, size, seed, done, before
        self.epoch = self.row = 0
        if before is not None:
            self.epoch, number = before.place(done)
            self.row = before.first(self.epoch) + (number + 1) * before.size

    def first(self, epoch: int) -> int:
        """Return the position in an epoch at which its steps of this size begin."""
        return self.row if epoch == self.epoch else 0

    def count(self, epoch: int) -> int:
        """Return the number of an epoch's steps of this size."""
        return (len(self.source) - self.first(epoch)) // self.size

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and its number among the epoch's steps of this size, from 0 on."""
        number = step - 1 - self.done
        if (later := number - self.count(self.epoch)) < 0:
            return self.epoch, number
        epochs, number = divmod(later, self.count(self.epoch + 1))
        return self.epoch + 1 + epochs, number

    def batch(self, epoch: int, number: int, mine: np.ndarray) -> tuple:
        """Return the samples at some places of a step's batch, and the width of the batch if samples vary in length."""
        return (self.order(epoch, self.first(epoch) + number * self.size + mine),)

    def order(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions of an epoch."""
        return positions if self.source.ordered else permute(positions, len(self.source), key=(self.seed, epoch))


class Buckets(Steps):
    """Steps of samples of variable length.

    An epoch permutes the samples as it does without buckets. Every WINDOW global batches of that order are sorted by
    length, cut into batches again, and used in a random order. All replicas get equally many batches, of the same shape
    at each step.
    """

    source: VariableLength

    def batch(self, epoch: int, number: int, mine: np.ndarray) -> tuple:
        """See Steps."""
        indices = self._batch(epoch, number)
        longest = int(self.source.lengths(indices).max())
        return indices[mine], next(width for width in self.source.widths if width >= longest)

    def _batch(self, epoch: int, number: int) -> np.ndarray:
        window, number = divmod(number, WINDOW)
        return self._batches(epoch, window)[number]

    @lru_cache(2)  # noqa: B019  # the next step mostly needs another batch of the same window
    def _batches(self, epoch: int, window: int) -> np.ndarray:
        """Return the batches of a window in their order, int64 [batches, size]."""
        count = min(WINDOW, self.count(epoch) - window * WINDOW)
        first = self.first(epoch) + window * WINDOW * self.size
        indices = self._left(epoch, np.arange(first, first + count * self.size, dtype=np.int64))
        by_length = np.argsort(self.source.lengths(indices), kind="stable").reshape(count, -1)
        # A batch is not sorted by length, so that the last replica does not always get the longest samples.
        order = permute(np.arange(count), count, key=(self.seed, epoch, window))
        return indices[np.sort(by_length[order], axis=1)]

    def _left(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions of an epoch in the order that earlier steps left."""
        before = self._before if self.first(epoch) else None
        return super().order(epoch, positions) if before is None else before.order(epoch, positions)

    def order(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions of an epoch: those of these steps in their order, then the rest."""
        numbers, places = np.divmod(positions - self.first(epoch), self.size)
        used = {n: self._batch(epoch, n) for n in np.unique(numbers).tolist() if n < self.count(epoch)}
        places = zip(numbers.tolist(), places.tolist(), self._left(epoch, positions).tolist(), strict=True)
        return np.array([used[n][place] if n in used else left for n, place, left in places], dtype=np.int64)


class Stream(Steps):
    """Steps of an endless source, which has one epoch.

    The samples of a step are shuffled, so that no replica or micro-batch gets the same places of a mixture's order in
    every step.
    """

    def place(self, step: int) -> tuple[int, int]:
        """See Steps."""
        return 0, step - 1 - self.done

    def batch(self, epoch: int, number: int, mine: np.ndarray) -> tuple:
        """See Steps."""
        first = self.first(epoch) + number * self.size
        return (first + permute(mine, self.size, key=(self.seed, first)),)


class TrainBatches(Dataset):
    """The training batches of one replica, by step.

    The global batch of a step is a pure function of (seed, step): epoch e permutes the samples by the key (seed, e),
    unless the source is ``ordered``, and its steps use them in turn. A remainder smaller than a batch is left out of
    the epoch. Samples of variable length are grouped by length (see Buckets). Each replica gets an equal contiguous
    slice. To resume, it is enough to set the step, and the number of replicas does not change the global batches. Where
    the size of the global batch changes within an epoch, the next batch begins with the next sample of the epoch.

    Attributes:
        steps_per_epoch: Whole global batches in the source.
    """

    def __init__(
        self,
        source: Source,
        global_batch_size: int,
        seed: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        earlier: Sequence[tuple[int, int]] = (),
    ):
        """Select this replica's part.

        Args:
            source: The samples.
            global_batch_size: The samples of a step, over all replicas.
            seed: Determines the order of the samples.
            dp_rank: This replica.
            dp_size: The number of replicas.
            earlier: Other sizes of the global batch, each with the last step that had it, in order.

        Raises:
            DataError: If the source has fewer samples than a global batch or requires another batch size, or if the
                replicas cannot share the batch equally.
        """
        self._mine = _share(global_batch_size, dp_rank, dp_size)
        source.check_batch(global_batch_size)
        if len(source) < global_batch_size:
            fits = len(source) // dp_size * dp_size
            way_out = f"The largest batch that fits is {fits}" if fits else "Give more data"
            raise DataError(
                f"the training data has {len(source)} samples, fewer than one global batch of "
                f"train.global_batch_size={global_batch_size}. {way_out}"
            )
        self.steps_per_epoch = len(source) // global_batch_size
        kind = Stream if source.endless else Buckets if isinstance(source, VariableLength) else Steps
        before, done = None, 0
        for last_step, size in earlier:
            before, done = kind(source, size, seed, before, done), last_step
        self._steps = kind(source, global_batch_size, seed, before, done)

    def steps_until(self, epochs: float) -> int:
        """Return the last step of that many epochs."""
        now = self._steps
        left = epochs - now.epoch
        later = left * self.steps_per_epoch
        steps = now.count(now.epoch) + later - self.steps_per_epoch if left >= 1 else max(0, later - now.row / now.size)
        return now.done + math.ceil(round(steps, 6))

    def __getitem__(self, step: int) -> Batch:
        """Return this replica's slice, global_batch_size / dp_size samples, of a step's batch. Steps count from 1."""
        if step <= self._steps.done:
            raise ValueError(f"step {step}: training steps count from {self._steps.done + 1}")
        epoch, number = self._steps.place(step)
        indices, *width = self._steps.batch(epoch, number, self._mine)
        return _read(self._steps.source, indices, epoch, *width)


class EvalBatches:
    """The evaluation batches of one replica: all samples of a source once, in order, in batches of equal size.

    With a limit there are only so many batches, of samples that are spread evenly over the source and are always the
    same. The last global batch is padded with sample 0 at weight 0, so that every replica gets equally many batches of
    equal size for any number of samples. Every batch has weights. The length is the number of batches. All this holds
    for each part of joined sources: no batch has samples of two parts, and each part has the limit.

    Attributes:
        whole: The number of batches without a limit.
        counts: The number of batches of each part; {"": number} if the source has no parts.
    """

    def __init__(
        self, source: Source, global_batch_size: int, dp_rank: int = 0, dp_size: int = 1, limit: int | None = None
    ):
        """Select this replica's part of at most ``limit`` batches (None: all).

        Raises:
            DataError: If the replicas cannot share a batch equally, the source is empty, or the limit is below 1.
        """
        self._mine = _share(global_batch_size, dp_rank, dp_size)
        if len(source) == 0:
            raise DataError("the evaluation data has 0 samples; at least 1 is needed")
        if limit is not None and limit < 1:
            raise DataError(f"train.eval_batches={limit}: give 1 or more, or null for all batches")
        self._parts = source.parts if isinstance(source, Joined) else {"": source}
        wholes = {name: -(-len(part) // global_batch_size) for name, part in self._parts.items()}
        self.whole, self.counts = sum(wholes.values()), {name: min(n, limit or n) for name, n in wholes.items()}
        self.global_batch_size = global_batch_size

    def __len__(self) -> int:
        return sum(self.counts.values())

    def __iter__(self) -> Iterator[Batch]:
        for name, count in self.counts.items():
            source = self._parts[name]
            samples = min(len(source), count * self.global_batch_size)
            for batch in range(count):
                positions = batch * self.global_batch_size + self._mine
                real = positions < samples
                # Each sample represents an equal part of the source, and is in the middle of that part.
                spread = (2 * positions + 1) * len(source) // (2 * samples)
                read = _read(source, np.where(real, spread, 0), 0)
                yield replace(read, weights=torch.from_numpy(real.astype(np.float32)))


def _read(source: Source, indices: np.ndarray, *how: Any) -> Batch:
    """Read samples. Raises DataError if there is not one row for each index."""
    batch = Batch(*source.read(indices, *how))
    if uneven := [len(tensor) for tensor in batch.tensors if len(tensor) != len(indices)]:
        raise DataError(
            f"{type(source).__name__}.read() returned {uneven[0]} rows for {len(indices)} indices; it must return one "
            "for each. Leave damaged samples out of len(), or give them targets that do not count (-100)"
        )
    return batch


def _share(global_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """Return a replica's positions in a global batch. Raises DataError if the replicas cannot share it equally."""
    if global_batch_size < 1:
        raise DataError(f"train.global_batch_size={global_batch_size}: a batch needs at least 1 sample")
    if global_batch_size % dp_size:
        below = global_batch_size // dp_size * dp_size
        nearest = f"{below} and {below + dp_size}" if below else f"{dp_size}"
        raise DataError(
            f"train.global_batch_size={global_batch_size} cannot be shared equally by {dp_size} replicas; "
            f"the nearest that can are {nearest}"
        )
    size = global_batch_size // dp_size
    return np.arange(dp_rank * size, (dp_rank + 1) * size, dtype=np.int64)


def train_loader(
    batches: TrainBatches,
    first_step: int,
    last_step: int,
    num_workers: int = 0,
    pin_memory: bool = False,
    timeout_s: float = 300.0,
) -> Iterator[tuple[int, Batch]]:
    """Yield (step, batch) from the first to the last step. Each batch is read before it is needed.

    A thread reads the batches, or gets those that ``num_workers`` processes read. Thread and processes end with the
    iterator (exhausted, closed or deleted).

    Raises:
        DataError: If a batch takes longer than ``timeout_s``, or the processes cannot be started or die. An error while
            reading is raised unchanged.
    """
    steps = range(first_step, last_step + 1)
    read = read_in_processes(batches, steps, num_workers) if num_workers else (batches[step] for step in steps)
    yield from zip(steps, read_ahead(read, pin_memory, timeout_s, "batch of step", first_step), strict=True)
