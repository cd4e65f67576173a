"""Processes that measure together, each on a core (or a GPU) of its own and connected by torch.distributed."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from common.machine import changed_environment
from launchers.meeting import use_loopback
from parallel.devices import keep_freed_memory, local_device
from parallel.host_group import init_process_group

RANKS = 2
_TIMEOUT_S = 1800.0  # of an operation between them
_ALL_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def device_type() -> str:
    """Return "cuda" if each rank gets a GPU, else "cpu"."""
    return "cuda" if torch.cuda.device_count() >= RANKS else "cpu"


def cores() -> list[int]:
    """Return the cores that the ranks use, in order."""
    return list(_ALL_CORES)[:RANKS]


def run(function: Callable, *args: Any) -> Any:
    """Call ``function(rank, *args)`` in ``RANKS`` processes at the same time; returns rank 0's result."""
    with closing(Workers(_callable, function, args, size=RANKS)) as workers:
        return workers.step(0)


class Workers:
    """New processes that each hold what ``build(rank, *args)`` returned and take their steps together.

    So the memory of one contender is in no other's way.
    """

    def __init__(self, build: Callable, *args: Any, size: int = 1, keep_memory: bool = True, **place: Any) -> None:
        """Start the processes and wait until all have called ``build``.

        Args:
            build: A function or class at the top level of a module; returns an object with ``step(number)``.
            *args: Its arguments; they must be picklable.
            size: The number of processes.
            keep_memory: Whether freed memory is kept (``parallel.devices``); else the C library's defaults hold.
            **place: Where a process runs; see ``_settle``.
        """
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        spawn = multiprocessing.get_context("spawn")
        # One heap for all threads: otherwise each thread of another library keeps gigabytes in a heap of its own.
        with changed_environment({"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1" if keep_memory else None}):
            for rank in range(size):
                ours, theirs = spawn.Pipe()
                settle = partial(_settle, rank, size, f"{self._folder.name}/store", keep_memory, **place)
                process = spawn.Process(target=_serve, args=(theirs, settle, partial(build, rank, *args)), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        self._wait()

    def step(self, number: int) -> Any:
        """Call ``step(number)`` in all processes at once; returns rank 0's result.

        Raises:
            RuntimeError: If a process has died.
        """
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # the process has died, which _wait reports
                pipe.send(number)
        return self._wait()

    def close(self) -> None:
        """Kill the processes: the clean-up of the compared libraries may wait for their threads for ever."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def _wait(self) -> Any:
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._pipes):
            for pipe in wait(set(self._pipes) - answers.keys()):
                try:
                    answers[pipe] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = self._processes[self._pipes.index(pipe)]
                    process.join()
                    raise RuntimeError(f"a worker has died with exit code {process.exitcode}") from None
        return answers[self._pipes[0]]


def _serve(pipe: Connection, settle: Callable[[], None], build: Callable) -> None:
    settle()
    built = build()
    pipe.send(None)
    with suppress(EOFError):  # the benchmark has ended
        while True:
            pipe.send(built.step(pipe.recv()))


def _settle(
    rank: int,
    size: int,
    store: str,
    keep_memory: bool,
    threads: int = 1,
    all_cores: bool = False,
    device: str | None = None,
) -> None:
    """Put this process on its core or GPU, and connect it with the other ranks.

    Args:
        rank: Of this process.
        size: The number of ranks.
        store: The file through which they meet.
        keep_memory: Whether freed memory is kept.
        threads: The number of threads that one operation uses.
        all_cores: Whether it may run on the cores of all ranks; else it stays on its own.
        device: "cpu" or "cuda", where processes share GPUs if there are fewer of them; ``device_type()`` if None.
    """
    device = device or device_type()
    if device == "cuda":
        local_device(device, rank)
    else:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores() if all_cores else {cores()[rank % len(cores())]})
        if keep_memory:
            keep_freed_memory()
    torch.set_num_threads(threads)
    if size > 1:
        use_loopback()
        meeting = dist.FileStore(store, size)
        init_process_group(device, rank, size, rank, meeting, _TIMEOUT_S)


def _callable(rank: int, function: Callable, args: tuple) -> SimpleNamespace:
    return SimpleNamespace(step=lambda number: function(rank, *args))
