"""Two processes that stay for a while, each on a core (or a GPU) of its own: for all contenders of a comparison
(``run``), or for each contender anew (``Apart``)."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist

from common.machine import changed_environment
from launchers import World, connect, run_workers, use_loopback
from parallel.devices import keep_freed_memory

RANKS = 2
# One heap for all threads: a peer's worker threads would each keep one of their own, of gigabytes, until the end.
_HEAPS = "MALLOC_ARENA_MAX"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", _HEAPS: "1"}
TIMEOUT_S = 600.0
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def device_type() -> str:
    """cuda where each rank gets a GPU, else cpu."""
    return "cuda" if torch.cuda.device_count() >= RANKS else "cpu"


def run(entry: str, *args: Any) -> Any:
    """``entry(rank, *args)`` on both ranks at the same time, connected by torch.distributed, one CPU thread each.

    entry    "module:function"; args: picklable
    returns  what rank 0's call returned, which must be fit for JSON
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        run_workers(_work, (entry, args, str(result)), RANKS, folder, env=_ENVIRONMENT)
        return json.loads(result.read_text())


def _work(world: World, entry: str, args: tuple, result: str) -> None:
    kind = device_type()
    if kind == "cuda":
        torch.cuda.set_device(world.local_rank)
    else:
        stay_on_core(world.rank)
        keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group(BACKENDS[kind], store=connect(world, TIMEOUT_S), rank=world.rank, world_size=world.size)
    try:
        found = resolve_name(entry)(world.rank, *args)
        if world.rank == 0:
            Path(result).write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def cores() -> list[int]:
    """The cores that this benchmark may use, in order."""
    return sorted(_ALL)


def stay_on_core(rank: int, all_ranks: bool = False) -> None:
    """This thread, and those that it starts from now on, run on the rank's core, or on those of all ranks."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores()[:RANKS] if all_ranks else {cores()[rank % len(_ALL)]})


class Apart:
    """What ``build(rank, *args)`` returns, in ``size`` processes of its own, connected by torch.distributed where they
    are several, so that no other contender's memory is in their way. build, args: picklable.

    threads  in an operation
    wide     whether one process may run on the cores of all ranks; else each stays on its own
    kept     whether freed memory is kept (``parallel.devices``); else the C library's allocator is as it comes
    """

    def __init__(
        self, build: Callable, *args: Any, size: int = 1, threads: int = 1, wide: bool = False, kept: bool = True
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        spawn = multiprocessing.get_context("spawn")
        self._lines: list[Connection] = []
        self._processes = []
        with changed_environment({"OMP_NUM_THREADS": "1", _HEAPS: "1" if kept else None}):
            for rank in range(size):
                ours, theirs = spawn.Pipe()
                place = _Place(rank, size, f"{self._folder.name}/meeting", threads, wide, kept)
                process = spawn.Process(target=_serve, args=(theirs, place, build, args), daemon=True)
                process.start()
                theirs.close()
                self._lines.append(ours)
                self._processes.append(process)
        self._answer()

    def step(self, number: int) -> float:
        """All its processes' ``step(number)`` at once; what rank 0's returns. RuntimeError where a process has died or
        does not answer."""
        for line in self._lines:
            with suppress(BrokenPipeError):  # it has died: so says the answer
                line.send(number)
        return self._answer()

    def close(self) -> None:
        """Ends the processes, without the peers' clean-up, which may wait for threads of theirs for ever."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def _answer(self) -> Any:
        """Rank 0's, once all have answered."""
        deadline, answers, open_lines = time.monotonic() + TIMEOUT_S, {}, list(self._lines)
        while open_lines:
            ready = wait(open_lines, deadline - time.monotonic())
            if not ready:
                raise RuntimeError(f"waited {TIMEOUT_S:g} s for a step of the processes apart")
            for line in ready:
                try:
                    answers[line] = line.recv()
                except (EOFError, ConnectionResetError):
                    process = self._processes[self._lines.index(line)]
                    process.join()
                    raise RuntimeError(f"a process apart has died with exit code {process.exitcode}") from None
                open_lines.remove(line)
        return answers[self._lines[0]]


@dataclass(frozen=True)
class _Place:
    """Where a process of a contender apart runs, and how. ``meeting``: a file for its ranks to meet by."""

    rank: int
    size: int
    meeting: str
    threads: int
    wide: bool
    kept: bool


def _serve(line: Connection, place: _Place, build: Callable, args: tuple) -> None:
    kind = device_type()
    if kind == "cuda":
        torch.cuda.set_device(place.rank)
    else:
        stay_on_core(place.rank, place.wide)
        if place.kept:
            keep_freed_memory()
    torch.set_num_threads(place.threads)
    if place.size > 1:
        use_loopback()
        store = dist.FileStore(place.meeting, place.size)
        dist.init_process_group(BACKENDS[kind], store=store, rank=place.rank, world_size=place.size)
    built = build(place.rank, *args)
    line.send(None)
    while True:
        line.send(built.step(line.recv()))


_ALL = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
