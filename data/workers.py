"""Processes that read batches, and send them without shared memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from common.errors import DataError
from common.files import explain
from data.batch import Batch

AHEAD = 2  # batches that a reader is ahead
_SHARED_MEMORY = Path("/dev/shm")  # where processes have their semaphores
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def read_in_processes(batches: Dataset, steps: range, num_workers: int) -> Iterator[Batch]:
    """Yield the batches of some steps. Call it in a thread of its own.

    In the main thread torch would install a handler that raises the death of a worker wherever that thread is.

    Raises:
        DataError: The processes cannot be started, one of them dies, or a batch cannot be read.
    """
    given = f"data.num_workers={num_workers}"
    way_out = "Use fewer, or data.num_workers=0, which reads in a thread"
    loader = DataLoader(
        _InWorker(batches),
        batch_size=None,
        sampler=steps,
        num_workers=num_workers,
        prefetch_factor=AHEAD,
        collate_fn=_unchanged,
        worker_init_fn=_ignore_signals,
        # Without one of its own the loader draws from the global one, and the run would depend on num_workers.
        generator=torch.Generator(),
    )
    # Ctrl-C and the signals to stop reach every process of the group, and kill those that do not handle them. They are
    # blocked while the workers start, so that none arrives before a worker ignores it; this process handles its own
    # afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        multiprocessing.Event()  # a semaphore, as the loader's own: half a loader ends with tracebacks
        iterator = iter(loader)
    except OSError as error:
        raise DataError(
            f"{given}: the processes that read data cannot be started: {explain(error, _SHARED_MEMORY)}. {way_out}"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        for item in iterator:
            if isinstance(item, DataError):
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
    """The batches as a worker sends them: as arrays, through its pipe.

    Tensors would go through /dev/shm, which is small in a container (64 MB in Docker's), and a batch that does not fit
    is lost without an error in the process that waits for it.
    """

    def __init__(self, batches: Dataset) -> None:
        self._batches = batches

    def __getitem__(self, step: int) -> Batch | DataError:
        try:
            return self._batches[step].to_arrays()
        except DataError as error:
            return error  # torch would raise it with the worker's traceback as its message


def _unchanged(item: Batch | DataError) -> Batch | DataError:
    return item


def _ignore_signals(worker: int) -> None:
    """Leave signals to the main process, and print nothing when that ends while it takes a batch."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    unblocked = set(_SIGNALS)
    if hasattr(signal, "sigwaitinfo"):
        # The main process ends a worker by SIGTERM. It stays blocked here, and a thread sees who sent it.
        unblocked.remove(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=_exit_by_parent, args=(os.getppid(),), name="exit-by-parent", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)
    default_hook = sys.excepthook

    def ignore_lost_connection(kind, error, trace) -> None:
        if not issubclass(kind, (ConnectionError, EOFError)):
            default_hook(kind, error, trace)

    sys.excepthook = ignore_lost_connection


def _exit_by_parent(parent: int) -> None:
    """End this process at the first SIGTERM that its parent sends."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
