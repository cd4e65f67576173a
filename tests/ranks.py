"""Groups of worker processes that stay alive over many test cases: starting four ranks costs more than most cases."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch.multiprocessing as mp

CASE_TIMEOUT_S = 120


class Ranks:
    """``size`` gloo ranks on loopback, each of which runs the functions it is given."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable, *args) -> list:
        """``function(*args)`` on every rank at once; what each returned, by rank. Raises the first rank's error."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(CASE_TIMEOUT_S):
                raise TimeoutError(f"rank {rank} of {len(self._pipes)} gave no answer in {CASE_TIMEOUT_S} s")
            answers.append(pipe.recv())
        for rank, (ok, value) in enumerate(answers):
            assert ok, f"rank {rank}:\n{value}"
        return [value for _, value in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(rank: int, size: int, port: int, pipe) -> None:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if size > 1:
        store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=60))
        timeout = timedelta(seconds=CASE_TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
