"""Reads batches before a step needs them: by a thread, or by processes that send them without shared memory."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from common.errors import DataError
from common.files import explain
from data.dataset import Batch

AHEAD = 2  # the number of batches that a reader reads ahead
_END_S = 10.0  # the longest wait for the thread to end, since it may hang on a disk
_SHARED_MEMORY = Path("/dev/shm")  # the folder of the processes' semaphores
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def read_ahead(
    batches: Iterable[Batch],
    pin_memory: bool = False,
    timeout_s: float = 300.0,
    what: str = "evaluation batch",
    first: int = 1,
) -> Iterator[Batch]:
    """Yield batches that a thread has read before they are needed, page-locked with ``pin_memory``.

    An error while reading is raised here. The thread ends with the iterator (exhausted, closed or deleted).

    Raises:
        DataError: If a batch takes longer than ``timeout_s``. The message has ``what`` and its number from ``first``.
    """
    ready: queue.Queue = queue.Queue(maxsize=AHEAD)
    stop = threading.Event()

    def read() -> None:
        torch.get_num_threads()  # otherwise a thread's first operation would undo the next line
        torch.set_num_threads(1)
        begun.set()
        try:
            for batch in batches:
                if stop.is_set():
                    return
                ready.put((batch.pin_memory() if pin_memory else batch, None))
            ready.put((None, None))
        except BaseException as error:
            ready.put((None, error))

    # With a second pool there are more threads than cores, and OpenMP would put those of the first to sleep after every
    # operation: a small model's steps took twice as long.
    threads, begun = torch.get_num_threads(), threading.Event()
    thread = threading.Thread(target=read, name="read-ahead", daemon=True)
    thread.start()
    begun.wait()
    torch.set_num_threads(threads)  # MKL has one number for all threads
    try:
        for number in itertools.count(first):
            try:
                batch, error = ready.get(timeout=timeout_s)
            except queue.Empty:
                raise DataError(
                    f"the {what} {number} was not read within {timeout_s:g} s (parallel.timeout_s). Is the disk or "
                    "network file system that holds the data still there?"
                ) from None
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
    finally:
        stop.set()
        with suppress(queue.Empty):  # makes room for what the thread still puts, a batch and the end
            while True:
                ready.get_nowait()
        thread.join(_END_S)


def read_in_processes(batches: Dataset, steps: range, num_workers: int) -> Iterator[Batch]:
    """Yield the batches of some steps. Call this in a thread that does nothing else.

    In the main thread torch would install a handler that raises the death of a worker at any point of that thread.

    Raises:
        DataError: If the processes cannot be started, one of them dies, or a batch cannot be read.
    """
    given = f"data.num_workers={num_workers}"
    way_out = "Use fewer, or data.num_workers=0, which reads in a thread"
    loader = DataLoader(
        _InWorker(batches),
        batch_size=None,
        sampler=steps,
        num_workers=num_workers,
        prefetch_factor=AHEAD,
        worker_init_fn=_end_with_parent,
        # Without its own generator the loader draws from the global one, and the run would depend on num_workers.
        generator=torch.Generator(),
    )
    # Signals are blocked while the workers start, so that none arrives before a worker ignores it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        multiprocessing.Event()  # fails if there are no semaphores; the loader would fail half-built, with tracebacks
        iterator = iter(loader)
    except OSError as error:
        raise DataError(
            f"{given}: the processes that read data cannot be started: {explain(error, _SHARED_MEMORY)}. {way_out}"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        for item in iterator:
            if isinstance(item, Exception):
                raise item
            yield item.to_tensors()
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            f"{given}: a process that reads data was killed ({str(error).partition(chr(10))[0]}). If nobody killed it, "
            f"the machine ran out of memory. {way_out}"
        ) from error


class _InWorker(Dataset):
    """The batches as arrays, which a worker sends through its pipe.

    Tensors would be sent through /dev/shm, which is small in a container (64 MB in Docker), and a batch that does not
    fit is lost without an error in the process that waits for it.
    """

    def __init__(self, batches: Dataset) -> None:
        self._batches = batches

    def __getitem__(self, step: int) -> Batch | Exception:
        try:
            return self._batches[step].to_arrays()
        except (DataError, OSError) as error:
            return error  # torch would raise it with the worker's traceback as its message


def _end_with_parent(worker: int) -> None:
    """Leave signals to the main process, because Ctrl-C and the signals to stop reach every process of the group."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    unblocked = set(_SIGNALS)
    if hasattr(signal, "sigtimedwait"):  # not on macOS
        # The main process ends a worker by SIGTERM. It stays blocked here, and a thread checks which process sent it.
        unblocked.remove(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=_watch_parent, args=(os.getppid(),), name="watch-parent", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)


def _watch_parent(parent: int) -> None:
    """End this process when its parent sends SIGTERM or ends. torch does not check that while no batch is taken."""
    while os.getppid() == parent:
        sent = signal.sigtimedwait({signal.SIGTERM}, 1.0)
        if sent is not None and sent.si_pid == parent:
            break
    os._exit(0)
