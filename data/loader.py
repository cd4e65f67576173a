"""From samples to batches: which samples a step trains on, and reading them before the step needs them."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch.utils.data import Dataset

from common.errors import DataError
from data.batch import Batch
from data.buckets import Buckets, VariableLength
from data.dataset import Source
from data.shuffle import permute
from data.workers import AHEAD, read_in_processes

_END_S = 10.0  # for the thread to end: one that hangs on a disk is left behind


class TrainBatches(Dataset):
    """The training batches by step, as one replica sees them.

    The global batch of a step is a pure function of (seed, step): epoch e permutes the samples by the key (seed, e),
    unless the source is ``ordered``, and its steps take them in turn. A remainder smaller than a batch is left out of
    the epoch. Samples of variable length are grouped by length (see data.buckets). A replica takes its contiguous equal
    slice. So resuming is setting the step, and the number of replicas changes nothing.

    Attributes:
        steps_per_epoch: Whole global batches in the source.
    """

    def __init__(self, source: Source, global_batch_size: int, seed: int, dp_rank: int = 0, dp_size: int = 1):
        """Take this replica's part; ``global_batch_size`` counts the samples of all.

        Raises:
            DataError: The source has fewer samples than a global batch or requires another batch size, or the replicas
                cannot share the batch equally.
        """
        _check_replicas(global_batch_size, dp_rank, dp_size)
        source.check_batch(global_batch_size)
        if len(source) < global_batch_size:
            fits = len(source) // dp_size * dp_size
            way_out = f"The largest batch that fits is {fits}" if fits else "Give more data"
            raise DataError(
                f"the training data has {len(source)} samples, fewer than one global batch of "
                f"train.global_batch_size={global_batch_size}. {way_out}"
            )
        self.source = source
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.steps_per_epoch = len(source) // global_batch_size
        self.buckets = Buckets(source, global_batch_size, seed) if isinstance(source, VariableLength) else None

    def __getitem__(self, step: int) -> Batch:
        """Return this replica's slice, global_batch_size / dp_size samples, of a step's batch. Steps count from 1."""
        if step < 1:
            raise ValueError(f"step {step}: training steps count from 1")
        epoch, step_of_epoch = divmod(step - 1, self.steps_per_epoch)
        mine = _slice(self.global_batch_size, self.dp_rank, self.dp_size)
        if self.buckets is not None:
            indices, width = self.buckets.batch(epoch, step_of_epoch)
            return Batch(*self.source.read(indices[mine], epoch, width))
        positions = step_of_epoch * self.global_batch_size + mine
        ordered = self.source.ordered
        indices = positions if ordered else permute(positions, len(self.source), key=(self.seed, epoch))
        return Batch(*self.source.read(indices, epoch))


def train_loader(
    batches: TrainBatches,
    first_step: int,
    last_step: int,
    num_workers: int = 0,
    pin_memory: bool = False,
    timeout_s: float = 300.0,
) -> Iterator[tuple[int, Batch]]:
    """Yield (step, batch) from the first to the last step, read before it is needed.

    A thread reads, or takes what ``num_workers`` processes read. Thread and processes end with the iterator (exhausted,
    closed or deleted).

    Raises:
        DataError: A batch takes longer than ``timeout_s``, or the processes cannot be started or die. An error while
            reading is raised as it is.
    """
    steps = range(first_step, last_step + 1)
    read = read_in_processes(batches, steps, num_workers) if num_workers else (batches[step] for step in steps)
    yield from zip(steps, read_ahead(read, pin_memory, timeout_s, "batch of step", first_step), strict=True)


class EvalBatches:
    """All samples of a source once, in order, in batches of equal size, as one replica sees them.

    With a limit they are as many whole batches, of samples that are spread evenly over the source: always the same
    ones. The last global batch is padded with sample 0 at weight 0, so that every replica gets equally many batches of
    equal size, whatever the number of samples. Every batch has weights. The length is the number of batches.

    Attributes:
        whole: The number of batches without a limit.
    """

    def __init__(
        self,
        source: Source,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        limit: int | None = None,
    ):
        """Take this replica's part of at most ``limit`` batches (None: all).

        Raises:
            DataError: The replicas cannot share a batch equally, the source is empty, or the limit is below 1.
        """
        _check_replicas(global_batch_size, dp_rank, dp_size)
        if len(source) == 0:
            raise DataError("the evaluation data has 0 samples; at least 1 is needed")
        if limit is not None and limit < 1:
            raise DataError(f"train.eval_batches={limit}: give 1 or more, or null for all of them")
        self.source = source
        self.global_batch_size = global_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.whole = -(-len(source) // global_batch_size)
        self._samples = len(source)
        if limit is not None and limit < self.whole:
            self._samples = limit * global_batch_size

    def __len__(self) -> int:
        return -(-self._samples // self.global_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        mine = _slice(self.global_batch_size, self.dp_rank, self.dp_size)
        for batch in range(len(self)):
            positions = batch * self.global_batch_size + mine
            real = positions < self._samples
            # Each sample stands for an equal part of the source, and is the one in its middle.
            spread = (2 * positions + 1) * len(self.source) // (2 * self._samples)
            inputs, targets = self.source.read(np.where(real, spread, 0), epoch=0)
            yield Batch(inputs, targets, torch.from_numpy(real.astype(np.float32)))


def _check_replicas(global_batch_size: int, dp_rank: int, dp_size: int) -> None:
    if global_batch_size < 1:
        raise DataError(f"train.global_batch_size={global_batch_size}: a batch needs at least 1 sample")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank={dp_rank} is not one of {dp_size} replicas, which count from 0")
    if global_batch_size % dp_size:
        below = global_batch_size // dp_size * dp_size
        nearest = f"{below} and {below + dp_size}" if below else f"{dp_size}"
        raise DataError(
            f"train.global_batch_size={global_batch_size} cannot be shared equally by {dp_size} replicas; "
            f"the nearest that can: {nearest}"
        )


def _slice(global_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """Return a replica's positions in the global batch."""
    size = global_batch_size // dp_size
    return np.arange(dp_rank * size, (dp_rank + 1) * size, dtype=np.int64)


def read_ahead(
    batches: Iterable[Batch],
    pin_memory: bool = False,
    timeout_s: float = 300.0,
    what: str = "evaluation batch",
    first: int = 1,
) -> Iterator[Batch]:
    """Yield batches that a thread has read before they are needed, page-locked where asked for.

    An error while reading is raised here. The thread ends with the iterator (exhausted, closed or deleted).

    Raises:
        DataError: One takes longer than ``timeout_s``; it names ``what`` it is, counted from ``first``.
    """
    ready: queue.Queue = queue.Queue(maxsize=AHEAD)
    stop = threading.Event()

    def put(item: tuple[Batch | None, BaseException | None]) -> None:
        # A plain put() would wait for ever once nobody takes batches any more.
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for batch in batches:
                if stop.is_set():
                    return
                put((batch.pin_memory() if pin_memory else batch, None))
            put((None, None))
        except BaseException as error:
            put((None, error))

    thread = threading.Thread(target=read, name="read-ahead", daemon=True)
    thread.start()
    try:
        for number in itertools.count(first):
            try:
                batch, error = ready.get(timeout=timeout_s)
            except queue.Empty:
                raise DataError(
                    f"the {what} {number} was not read within {timeout_s:g} s (parallel.timeout_s): is the disk "
                    "or network file system that holds the data still there?"
                ) from None
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
    finally:
        stop.set()
        thread.join(_END_S)
