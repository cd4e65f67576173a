"""Which devices there are, and how many cores a process may use."""

from __future__ import annotations

import ctypes

import torch

from common.errors import PlanError
from common.machine import usable_cores


def resolve_device_type(wanted: str, processes: int | None = None) -> str:
    """``auto`` -> cuda, else mps (one process only), else cpu. Raises PlanError for a device that is not here."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted == "auto":
        if present["cuda"]:
            return "cuda"
        return "mps" if present["mps"] and processes == 1 else "cpu"
    if not present[wanted]:
        found = ", ".join(name for name, here in present.items() if here)
        raise PlanError(f"device={wanted} but this machine has none; here are: {found} (device=auto takes the best)")
    return wanted


def device_count(device_type: str) -> int | None:
    """How many devices there are; None for CPUs, whose cores any number of processes may share."""
    return {"cuda": torch.cuda.device_count, "mps": lambda: 1, "cpu": lambda: None}[device_type]()


def local_device(device_type: str, local_rank: int) -> torch.device:
    """The device of this rank: one GPU each, or the CPU that all share."""
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device(device_type)


def share_cores(processes: int, wanted: int | None) -> int:
    """Set this process's threads: ``wanted``, or the cores divided among ``processes``. Returns their number."""
    threads = max(1, usable_cores() // processes) if wanted is None else wanted
    torch.set_num_threads(threads)
    return threads


def keep_freed_memory(weights: int = 0) -> None:
    """Have the C allocator keep what a CPU run frees, for the next micro-batch.

    glibc hands every large tensor back to the kernel when it is freed and has its pages zeroed again for the next:
    a third of the time of a GPT-2 step. Not in torch's huge pages (THP_MEM_ALLOC_ENABLE): steps are as fast without,
    and its aligned blocks leave gaps that glibc fills with fresh memory for another five steps. With more than 1 GiB
    of ``weights`` (bytes, of this process) tensors from 32 MiB on are still handed back, a sixth slower: gradients
    move once into DDP's buckets, and what the heap keeps of the first copy is the model's size once more. Other C
    libraries are left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20 if weights > 2**30 else _LARGEST_INT)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_INT = 2**31 - 1
