"""Processes that measure together, each on a core (or a GPU) of its own and connected by torch.distributed."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from common.machine import changed_environment
from launchers import use_loopback
from parallel.devices import keep_freed_memory, local_device
from parallel.host_group import choose_backend

RANKS = 2
TIMEOUT_S = 3600.0
_ALL_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
# One heap for all threads: otherwise each thread of another library keeps gigabytes in a heap of its own.
_HEAPS = "MALLOC_ARENA_MAX"


def device_type() -> str:
    """Return "cuda" if each rank gets a GPU, else "cpu"."""
    return "cuda" if torch.cuda.device_count() >= RANKS else "cpu"


def cores() -> list[int]:
    """Return the cores that the ranks use, in order."""
    return list(_ALL_CORES)[:RANKS]


def run(function: Callable, *args: Any) -> Any:
    """Call ``function(rank, *args)`` in ``RANKS`` processes at the same time; returns rank 0's result."""
    with closing(Workers(_Call, function, args, size=RANKS)) as workers:
        return workers.step(0)


class Workers:
    """New processes that each hold what ``build(rank, *args)`` returned and take their steps together.

    So the memory of one contender is in no other's way.
    """

    def __init__(
        self,
        build: Callable,
        *args: Any,
        size: int = 1,
        threads: int = 1,
        all_cores: bool = False,
        keep_memory: bool = True,
        device: str | None = None,
    ) -> None:
        """Start the processes and waits until all have called ``build``.

        Args:
            build: A function or class at the top level of a module; returns an object with ``step(number)``.
            *args: Its arguments; they must be picklable.
            size: The number of processes.
            threads: The number of threads that one operation uses.
            all_cores: Whether a process may run on the cores of all ranks; else each stays on its own.
            keep_memory: Whether freed memory is kept (``parallel.devices``); else the C library's defaults hold.
            device: "cpu" or "cuda", where processes share GPUs if there are fewer of them; ``device_type()`` if None.
        """
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        spawn = multiprocessing.get_context("spawn")
        with changed_environment({"OMP_NUM_THREADS": "1", _HEAPS: "1" if keep_memory else None}):
            for rank in range(size):
                ours, theirs = spawn.Pipe()
                place = _Place(rank, size, f"{self._folder.name}/store", threads, all_cores, keep_memory, device)
                process = spawn.Process(target=_serve, args=(theirs, place, build, args), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        self._wait()

    def step(self, number: int) -> Any:
        """Call ``step(number)`` in all processes at once; returns rank 0's result.

        Raises:
            RuntimeError: If a process has died or does not answer.
        """
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # the process has died, which _wait reports
                pipe.send(number)
        return self._wait()

    def close(self) -> None:
        """Kills the processes: the clean-up of the compared libraries may wait for their threads for ever."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def _wait(self) -> Any:
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._pipes):
            ready = wait(set(self._pipes) - answers.keys(), TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"waited {TIMEOUT_S:g} s for the workers to answer")
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = self._processes[self._pipes.index(pipe)]
                    process.join()
                    raise RuntimeError(f"a worker has died with exit code {process.exitcode}") from None
        return answers[self._pipes[0]]


@dataclass(frozen=True)
class _Place:
    """One of ``Workers``'s processes; ``store`` is the file through which the ranks meet."""

    rank: int
    size: int
    store: str
    threads: int
    all_cores: bool
    keep_memory: bool
    device: str | None


def _serve(pipe: Connection, place: _Place, build: Callable, args: tuple) -> None:
    device = place.device or device_type()
    if device == "cuda":
        local_device(device, place.rank)
    else:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores() if place.all_cores else {cores()[place.rank % len(cores())]})
        if place.keep_memory:
            keep_freed_memory()
    torch.set_num_threads(place.threads)
    if place.size > 1:
        use_loopback()
        store = dist.FileStore(place.store, place.size)
        backend, options = choose_backend(device, place.rank, place.size, place.rank, store)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, **options)
    built = build(place.rank, *args)
    pipe.send(None)
    with suppress(EOFError):  # the benchmark has ended
        while True:
            pipe.send(built.step(pipe.recv()))


@dataclass(frozen=True)
class _Call:
    rank: int
    function: Callable
    args: tuple

    def step(self, number: int) -> Any:
        return self.function(self.rank, *self.args)
