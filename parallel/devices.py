"""The devices of this machine, the threads and memory of a process that computes on a CPU, and numeric formats."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch

from common.errors import PlanError
from common.machine import usable_cores

# The dtype of products. With bf16_residual, the tensors that layers pass on are bf16, too.
_COMPUTE = {"bf16": torch.bfloat16, "bf16_residual": torch.bfloat16, "fp16": torch.float16}
CPU_PRECISION = "CPU_PRECISION"  # an environment variable that overrides what auto selects on a CPU


@dataclass(frozen=True)
class Hardware:
    """The hardware of the machines of a run.

    Attributes:
        device_type: cpu, cuda or mps.
        count: The number of devices of this type in a machine. None if it is not known, and for CPUs, because any
            number of processes may share cores.
        precision: The precision that ``auto`` selects; ``auto`` if it is not known.
    """

    device_type: str
    count: int | None = None
    precision: str = "auto"

    @classmethod
    def here(cls, wanted: str, alone: bool) -> Hardware:
        """Detect this machine's hardware. ``auto`` is the best device; mps only if a run has one process (``alone``).

        Raises PlanError if the machine has no such device.
        """
        counts: dict[str, int | None] = {"cpu": None}
        if torch.cuda.is_available():
            counts["cuda"] = torch.cuda.device_count()
        if torch.backends.mps.is_available():
            counts["mps"] = 1
        if wanted == "auto":
            wanted = "cuda" if "cuda" in counts else "mps" if "mps" in counts and alone else "cpu"
        elif wanted not in counts:
            raise PlanError(
                f"device={wanted}, but this machine has none; available are: {', '.join(counts)} (device=auto: best)"
            )
        return cls(wanted, counts[wanted], best_precision(wanted))


def local_device(device_type: str, local_rank: int) -> torch.device:
    """Return the device of this rank, a GPU or the CPU, and make it the current device.

    GPUs are assigned in turn. If there are fewer GPUs than ranks, ranks share them, unless a queue shows each rank only
    one GPU (see ``parallel.host_group.choose_backend``).
    """
    if device_type == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device(device_type)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def share_cores(processes: int, wanted: int | None) -> int:
    """Set and return the number of this process's threads: ``wanted``, or an equal part of the machine's cores."""
    threads = max(1, usable_cores() // processes) if wanted is None else wanted
    torch.set_num_threads(threads)
    return threads


def peak_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Return the peak memory of this process in bytes: the resident set on a CPU, torch's allocator on CUDA.

    Metal records no peak, so on ``mps`` the currently allocated memory is returned.
    """
    kind = str(device).partition(":")[0]
    if kind == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if kind == "mps":
        return torch.mps.current_allocated_memory()
    # Preferred over getrusage, where a worker inherits the peak of its parent process.
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        if found := re.search(r"^VmHWM:\s+(\d+) kB", status.read(), re.MULTILINE):
            return int(found[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def keep_freed_memory(weights: int = 0) -> None:
    """Let the C allocator keep the memory that a CPU run frees. ``weights`` is the size of the model in bytes.

    By default glibc returns every large tensor to the kernel when the tensor is freed, and the kernel zeroes the pages
    of the next large tensor. This takes a third of the time of a GPT-2 step. torch's huge pages (THP_MEM_ALLOC_ENABLE)
    are not used: steps are as fast without them, and their aligned blocks leave gaps that glibc fills with fresh memory
    for another five steps. With more than 1 GiB of weights, tensors from 32 MiB on are still returned, and steps are a
    sixth slower: gradients move once into DDP's buckets, and the heap would keep the memory of the first copy, which is
    as large as the model. With other C libraries this function does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20 if weights > 2**30 else _LARGEST_INT)
    mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_INT = 2**31 - 1


def check_compiler() -> None:
    """Raise PlanError if torch.compile finds no C++ compiler, which it needs for CPU code and for a GPU's launchers."""
    named = os.environ.get("CXX")
    candidates = [named] if named else ["g++", "clang++", "c++"]
    if not any(shutil.which(name) for name in candidates):
        raise PlanError(
            f"train.compile=true needs a C++ compiler on this machine (looked for {', '.join(candidates)}); install "
            "one (Debian: apt-get install g++), point CXX at it, or leave train.compile=false"
        )


# -- numeric formats --------------------------------------------------------------------------------------------------


def best_precision(device_type: str) -> str:
    """Return bf16 if the device computes it in hardware, otherwise fp32.

    On a CPU the environment variable ``CPU_PRECISION`` overrides this.
    """
    if device_type == "cuda":
        return "bf16" if torch.cuda.get_device_capability()[0] >= 8 else "fp32"  # Ampere; older cards emulate it
    if device_type == "mps":
        return "fp32"
    # These names are private. If torch removes them, fp32 is used, which is always correct.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    fast = any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    chosen = os.environ.get(CPU_PRECISION) or ("bf16" if fast else "fp32")
    if chosen not in ("fp32", "bf16"):
        raise PlanError(f"the environment variable {CPU_PRECISION}={chosen} must be fp32 or bf16, or not set")
    return chosen


def parameter_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights, gradients and optimizer state. bf16 and fp16 computation uses autocast."""
    return torch.float64 if precision == "fp64" else torch.float32


def between_layers(precision: str) -> torch.dtype | None:
    """Return the dtype of the floating-point tensors passed between layers; None if each layer chooses its own.

    Under autocast a residual stream stays in float32. In bf16 it takes half the memory, also when it is sent between
    stages.
    """
    return torch.bfloat16 if precision == "bf16_residual" else None


def autocast(precision: str, device_type: str, keep_casts: bool = True):
    """Return the autocast context for one whole step."""
    if precision not in _COMPUTE:
        return nullcontext()
    return torch.autocast(device_type, dtype=_COMPUTE[precision], cache_enabled=keep_casts)


def outside_autocast(device_type: str):
    """Return the context for a backward within a step's ``autocast``, so that gradients get the dtype of the forward.

    Autocast would compute gradients in bf16 even for a layer that computes in float32. The recomputation of activations
    in the backward enters the forward's autocast by itself.
    """
    return torch.autocast(device_type, enabled=False)
