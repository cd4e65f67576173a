"""Worker processes that stay alive over many test cases: starting four ranks costs more than most cases."""

import ctypes
import gc
import io
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from operator import itemgetter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from psutil import Process

from common.machine import changed_environment
from parallel import host_group

CASE_TIMEOUT_S = 120
GRACE_S = 3  # how long the other ranks have to answer after one has failed
_HOST = "127.0.0.1"
_MUCH = 2**30  # bytes of a process that gives back what it has freed


class Ranks:
    """Up to ``most`` processes, started when a case first needs them, of one thread each. Every case gets a gloo
    world of its own on the first n of them; a case that fails ends them all, and the next one starts new ones.

    With an ``environment`` (``pretend_cuda``) they are new interpreters, whose worlds are of another ``backend``."""

    def __init__(self, most: int = 8, environment: Mapping[str, str] | None = None, backend: str = "gloo") -> None:
        self._most, self._environment, self._backend = most, environment, backend
        self._cases = 0
        self._processes: list[mp.Process] = []
        self._pipes: list = []
        listener = socket.create_server((_HOST, 0))
        self._port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            _HOST, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def run(self, world: int, function: Callable, *args, **kwargs) -> list:
        """``function(*args, **kwargs)`` on ``world`` ranks at once; what each returned, by rank.

        The function is sent by its name. With one rank there is no process group. Raises AssertionError with the
        traceback of the rank that failed first, TimeoutError naming the ranks that gave no answer. A rank whose process
        has ended is named before others, which may only have noticed it.
        """
        self._start(world)
        _give_memory_back()  # that of the results of earlier cases
        self._cases += 1
        pipes = self._pipes[:world]
        for rank, pipe in enumerate(pipes):
            pipe.send((f"case-{self._cases}", rank, world, function, args, kwargs))
        answers, deadline = {}, time.monotonic() + CASE_TIMEOUT_S
        failures: list[tuple[bool, str]] = []  # whether the process answered, and what is wrong
        while len(answers) < world:
            ready = wait([p for p in pipes if p not in answers], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    ok, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
                    answered = True
                except EOFError:
                    ok, value = False, f"the process ended with exit code {self._processes[rank].exitcode}"
                    answered = False
                answers[pipe] = value
                if not ok:
                    failures.append((answered, f"rank {rank} of {world}:\n{value}"))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            self._stop()
            raise AssertionError(min(failures, key=itemgetter(0))[1])
        if len(answers) < world:
            self._stop()
            silent = [rank for rank, pipe in enumerate(pipes) if pipe not in answers]
            raise TimeoutError(f"ranks {silent} of {world} gave no answer in {CASE_TIMEOUT_S} s")
        for pipe in pipes:
            pipe.send(None)  # every rank has finished, and none needs the group any more
        return [answers[pipe] for pipe in pipes]

    def close(self) -> None:
        """End the processes."""
        self._stop()

    def _start(self, world: int) -> None:
        assert world <= self._most, f"a case wants {world} ranks, the pool has {self._most}"
        context = mp.get_context("spawn" if self._environment else "forkserver")
        while len(self._processes) < world:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(self._port, theirs, self._backend), daemon=True)
            with changed_environment(self._environment or {}):
                process.start()
            theirs.close()  # so that a process that dies closes the pipe
            self._pipes.append(ours)
            self._processes.append(process)

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes.clear()
        self._pipes.clear()


def _serve(port: int, pipe, backend: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if backend == "host":
        host_group.register()
    elif backend == "pretend_nccl":
        import pretend_nccl

        pretend_nccl.register()
    store = dist.TCPStore(_HOST, port, is_master=False, wait_for_workers=False)
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return  # the tests are over, however they ended
        if case is None:
            # A group that a forgotten strategy still refers to would keep gloo's thread, which wakes up 130 times a
            # second.
            gc.collect(0)
            if dist.is_initialized():
                dist.destroy_process_group()
            continue
        pipe.send_bytes(_answer(backend, store, *case))
        _give_memory_back()  # that of the answer


def _answer(
    backend: str, store: dist.Store, case: str, rank: int, world: int, function: Callable, args: tuple, kwargs: dict
) -> memoryview:
    """Whether the function returned, and what, or else the traceback; large, so that the rank keeps none of it."""
    try:
        if world > 1:
            timeout = timedelta(seconds=CASE_TIMEOUT_S)
            prefixed = dist.PrefixStore(case, store)
            dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=timeout)
        answer = True, function(*args, **kwargs)
    except Exception:
        answer = False, traceback.format_exc()
    _give_memory_back()  # before the answer is there twice
    buffer = io.BytesIO()  # by value: torch would send tensors as shared memory of a process that may end
    torch.save(answer, buffer)
    return buffer.getbuffer()


def _give_memory_back() -> None:
    """Give freed memory to other processes: a model may be large, and this process have no part in the next case."""
    if Process().memory_info().rss < _MUCH:  # a twentieth of a second, and pages to take again
        return
    gc.collect()  # a strategy refers to itself, and would stay with its weights and gradients
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc keeps what is freed, as room for what this process allocates next
        libc.malloc_trim(0)
