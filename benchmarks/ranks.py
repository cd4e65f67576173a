"""Two processes that stay for a while, each on a core (or a GPU) of its own.

The contenders of a comparison are built in the same two processes and step in turns, so that all of them meet the same
caches, the same allocator and the same noise.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist

from launchers import World, connect
from launchers.local import run_workers
from parallel.devices import keep_freed_memory

RANKS = 2
# One heap for all threads: a peer's worker threads would each keep one of their own, of gigabytes, until the end.
_HEAPS = "MALLOC_ARENA_MAX"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", _HEAPS: "1"}
TIMEOUT_S = 600.0


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
    backend = {"cpu": "gloo", "cuda": "nccl"}[kind]
    dist.init_process_group(backend, store=connect(world, TIMEOUT_S), rank=world.rank, world_size=world.size)
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


def stay_on_core(rank: int) -> None:
    """This thread, and those that it starts from now on, run on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores()[rank % len(_ALL)]})


@contextmanager
def on_all_cores(rank: int, threads: int) -> Iterator[None]:
    """This process may use every core of both ranks, with ``threads`` threads in an operation; the other rank waits."""
    if device_type() == "cuda":
        yield
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cores()[:RANKS]))
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)
        stay_on_core(rank)


class Apart:
    """What ``build(*args)`` returns, in a process of its own with the C library's allocator as it comes, on the cores
    that this thread may use, one thread in an operation. build, args: picklable."""

    def __init__(self, build: Callable, *args: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._line, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, build, args), daemon=True)
        with _without(_HEAPS):
            self._process.start()
        theirs.close()
        self._answer()

    def step(self, number: int) -> float:
        """What its ``step`` returns; RuntimeError where the process has died or does not answer."""
        with suppress(BrokenPipeError):  # it has died: so says the answer
            self._line.send(number)
        return self._answer()

    def close(self) -> None:
        """Ends the process, without the peers' clean-up, which may wait for threads of theirs for ever."""
        self._process.kill()
        self._process.join()

    def _answer(self) -> Any:
        try:
            if not self._line.poll(TIMEOUT_S):
                raise RuntimeError(f"waited {TIMEOUT_S:g} s for a step of the process apart")
            return self._line.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise RuntimeError(f"the process apart has died with exit code {self._process.exitcode}") from None


def _serve(line: Connection, build: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    built = build(*args)
    line.send(None)
    while True:
        line.send(built.step(line.recv()))


@contextmanager
def _without(name: str) -> Iterator[None]:
    """This process's environment lacks ``name`` meanwhile."""
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before


_ALL = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
