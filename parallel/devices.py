"""The devices of this machine, and the threads and memory of a process that computes on a CPU."""

from __future__ import annotations

import ctypes
import os
import shutil

import torch

from common.errors import PlanError
from common.machine import usable_cores


def resolve_device_type(wanted: str, processes: int | None = None) -> str:
    """Replace ``auto`` by the best available device.

    Args:
        wanted: auto, cpu, cuda or mps.
        processes: How many there will be, where that is known. mps is for one process only.

    Returns:
        cuda, mps or cpu.

    Raises:
        PlanError: If the machine has no such device.
    """
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted == "auto":
        if present["cuda"]:
            return "cuda"
        return "mps" if present["mps"] and processes == 1 else "cpu"
    if not present[wanted]:
        available = ", ".join(name for name, is_available in present.items() if is_available)
        raise PlanError(
            f"device={wanted} but this machine has none; here are: {available} (device=auto takes the best)"
        )
    return wanted


def device_count(device_type: str) -> int | None:
    """Count the devices. None for CPUs, whose cores any number of processes may share."""
    return {"cuda": torch.cuda.device_count, "mps": lambda: 1, "cpu": lambda: None}[device_type]()


def local_device(device_type: str, local_rank: int) -> torch.device:
    """Return the device of this rank: one GPU per rank, or the CPU that all share."""
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device(device_type)


def share_cores(processes: int, wanted: int | None) -> int:
    """Set the number of this process's threads.

    Args:
        processes: How many processes share this machine's cores.
        wanted: How many threads, or None for an equal part of the cores.

    Returns:
        The number of threads.
    """
    threads = max(1, usable_cores() // processes) if wanted is None else wanted
    torch.set_num_threads(threads)
    return threads


def keep_freed_memory(weights: int = 0) -> None:
    """Have the C allocator keep what a CPU run frees, for the next micro-batch.

    glibc hands every large tensor back to the kernel when it is freed and has its pages zeroed again for the next:
    a third of the time of a GPT-2 step. Not in torch's huge pages (THP_MEM_ALLOC_ENABLE): steps are as fast without,
    and its aligned blocks leave gaps that glibc fills with fresh memory for another five steps. With more than 1 GiB
    of weights tensors from 32 MiB on are still handed back, a sixth slower: gradients move once into DDP's buckets,
    and what the heap keeps of the first copy is the model's size once more. Other C libraries are left as they are.

    Args:
        weights: Of this process, in bytes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20 if weights > 2**30 else _LARGEST_INT)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_INT = 2**31 - 1


def check_compiler(device_type: str) -> None:
    """Raise PlanError where torch.compile has no C++ compiler to call (CPU code; a GPU's launchers too)."""
    named = os.environ.get("CXX")
    candidates = [named] if named else ["g++", "clang++", "c++"]
    if not any(shutil.which(name) for name in candidates):
        raise PlanError(
            f"train.compile=true needs a C++ compiler on this machine (looked for {', '.join(candidates)}); install "
            "one (Debian: apt-get install g++), point CXX at it, or leave train.compile=false"
        )
