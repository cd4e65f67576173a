"""From samples to batches: which samples a step trains on, and reading them ahead of the step."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from common.errors import DataError
from data.batch import Batch
from data.buckets import Buckets, VariableLength
from data.shuffle import permute
from data.source import Source

_AHEAD = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class TrainBatches(Dataset):
    """The training batches by step, as one replica sees them.

    The global batch of a step is a pure function of (seed, step): epoch e permutes the samples by the key
    (seed, e), unless the source is `ordered`, and its steps take them in turn; a rest smaller than a batch
    waits for another epoch. Samples of variable length are grouped by length (see data.buckets). A replica takes
    its contiguous equal slice. So resuming is setting the step, and the number of replicas changes nothing.
    """

    def __init__(self, source: Source, global_batch_size: int, seed: int, dp_rank: int = 0, dp_size: int = 1):
        """global_batch_size: samples per step over all replicas.

        Raises DataError if the source has fewer samples than that or wants another number, or if the replicas
        cannot share it equally.
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
        """This replica's slice, global_batch_size / dp_size samples, of the batch of `step` (from 1 on)."""
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
    batches: TrainBatches, first_step: int, last_step: int, num_workers: int = 0, pin_memory: bool = False
) -> Iterator[tuple[int, Batch]]:
    """(step, batch) for each step from `first_step` to `last_step`, the last included, read ahead of its use.

    num_workers: processes that read; 0: one thread, enough where reading is light (tokens). An error while
    reading is raised here. Thread and processes end with the iterator (exhausted, closed or dropped).
    pin_memory: batches come in page-locked memory (only with an accelerator).
    """
    steps = range(first_step, last_step + 1)
    if num_workers == 0:
        return _read_in_thread(batches, steps, pin_memory)
    return _read_in_processes(batches, steps, num_workers, pin_memory)


class EvalBatches:
    """All samples of a source once, in order, in batches of equal size, as one replica sees them.

    The last global batch is filled up with repeats of sample 0 of weight 0, so that every replica gets
    equally many batches of equal size, whatever the number of samples. Every batch has weights.
    """

    def __init__(
        self,
        source: Source,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        limit: int | None = None,
    ):
        """global_batch_size: samples per batch over all replicas. limit: at most so many batches; None: all.

        Raises DataError if the replicas cannot share a batch equally, for an empty source and for a limit
        below 1.
        """
        _check_replicas(global_batch_size, dp_rank, dp_size)
        if len(source) == 0:
            raise DataError("the evaluation data has 0 samples; at least 1 is needed")
        if limit is not None and limit < 1:
            raise DataError(f"train.eval_batches={limit}: give 1 or more, or null for all of them")
        self.source = source
        self.global_batch_size = global_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        whole = -(-len(source) // global_batch_size)
        self._length = whole if limit is None else min(whole, limit)

    def __len__(self) -> int:
        """Batches, the same number on every replica."""
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        mine = _slice(self.global_batch_size, self.dp_rank, self.dp_size)
        for batch in range(len(self)):
            positions = batch * self.global_batch_size + mine
            real = positions < len(self.source)
            inputs, targets = self.source.read(np.where(real, positions, 0), epoch=0)
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
    """A replica's positions in the global batch."""
    size = global_batch_size // dp_size
    return np.arange(dp_rank * size, (dp_rank + 1) * size, dtype=np.int64)


def _read_in_thread(batches: TrainBatches, steps: range, pin_memory: bool) -> Iterator[tuple[int, Batch]]:
    ready: queue.Queue = queue.Queue(maxsize=_AHEAD)
    stop = threading.Event()

    def put(item: tuple) -> None:
        # A plain put() would wait for ever on a consumer that has gone.
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for step in steps:
                if stop.is_set():
                    return
                batch = batches[step]
                put((step, batch.pin_memory() if pin_memory else batch, None))
        except BaseException as error:
            put((None, None, error))

    thread = threading.Thread(target=read, name="read-ahead", daemon=True)
    thread.start()
    try:
        for _ in steps:
            step, batch, error = ready.get()
            if error is not None:
                raise error
            yield step, batch
    finally:
        stop.set()
        thread.join()


def _read_in_processes(
    batches: TrainBatches, steps: range, num_workers: int, pin_memory: bool
) -> Iterator[tuple[int, Batch]]:
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=steps,
        num_workers=num_workers,
        prefetch_factor=_AHEAD,
        pin_memory=pin_memory,
        worker_init_fn=_outlive_interrupts,
        # Else the loader draws from the global generator, and the run would depend on num_workers.
        generator=torch.Generator(),
    )
    # Ctrl-C and the signals to stop reach every process of the group, and kill those that do not handle them.
    # Blocked while the workers start, which inherit that, the signals cannot arrive before a worker ignores
    # them; this process gets its own a moment later.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        iterator = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    yield from zip(steps, iterator, strict=True)


def _outlive_interrupts(worker: int) -> None:
    """Leave signals to the main process, and say nothing when it leaves in the middle of taking a batch."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    unblocked = set(_SIGNALS)
    if hasattr(signal, "sigwaitinfo"):
        # SIGTERM is how the main process ends a worker. Blocked, it waits for someone to see who has sent it.
        unblocked.remove(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=_heed_parent, args=(os.getppid(),), name="heed-parent", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)
    usual = sys.excepthook

    def quiet_about_the_connection(kind, error, trace) -> None:
        if not issubclass(kind, (ConnectionError, EOFError)):
            usual(kind, error, trace)

    sys.excepthook = quiet_about_the_connection


def _heed_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
