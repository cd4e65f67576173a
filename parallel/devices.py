"""The devices of this machine, the threads and memory of a process that computes on a CPU, and numeric formats."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from common.errors import PlanError
from common.machine import usable_cores

# What products are computed in. bf16_residual: what layers pass on is bf16, too.
_COMPUTE = {"bf16": torch.bfloat16, "bf16_residual": torch.bfloat16, "fp16": torch.float16}
CPU_PRECISION = "CPU_PRECISION"  # an environment variable: what auto is on a CPU, whatever the CPU can do


def resolve_device_type(wanted: str, processes: int | None = None) -> str:
    """Replace ``auto`` by the best available device; mps is for one process only.

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


@dataclass(frozen=True)
class Hardware:
    """What a run will find where it runs.

    Attributes:
        device_type: cpu, cuda or mps.
        count: The number of such devices of a machine. None for CPUs, whose cores any number of processes may share,
            and where it is not known.
        precision: What ``auto`` stands for there; ``auto`` where it is not known.
    """

    device_type: str
    count: int | None = None
    precision: str = "auto"

    @classmethod
    def here(cls, wanted: str, processes: int | None = None) -> Hardware:
        """Look at this machine. Arguments and errors are those of ``resolve_device_type``."""
        device_type = resolve_device_type(wanted, processes)
        count = {"cuda": torch.cuda.device_count, "mps": lambda: 1, "cpu": lambda: None}[device_type]()
        return cls(device_type, count, best_precision(device_type))


def local_device(device_type: str, local_rank: int) -> torch.device:
    """Return the device of this rank, the CPU that all share or a GPU, and make it the current one.

    GPUs are dealt in turn. Where there are fewer of them than ranks, ranks share them, unless each rank sees only the
    GPU that a queue has given it: ``gpus_in_common`` finds out.
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


def gpus_in_common(store: Store, rank: int, size: int, device: torch.device) -> list[list[int]]:
    """Find out which ranks have the same GPU. All ranks call this together, before anything else uses ``store``.

    Slices of GPUs (MIG), between which NCCL does not send, count as one.
    """
    # Every GPU of the world has a number of its own, whatever index a process sees it under.
    gpu = torch.cuda.get_device_properties(device)
    store.set(f"gpu-{rank}", "MIG" if " MIG " in gpu.name else str(gpu.uuid))
    ranks_of: dict[bytes, list[int]] = {}
    for other in range(size):
        ranks_of.setdefault(store.get(f"gpu-{other}"), []).append(other)
    return [ranks for ranks in ranks_of.values() if len(ranks) > 1]


def share_cores(processes: int, wanted: int | None) -> int:
    """Set the number of this process's threads, and return it: ``wanted``, or an equal part of the machine's cores."""
    threads = max(1, usable_cores() // processes) if wanted is None else wanted
    torch.set_num_threads(threads)
    return threads


def peak_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Return the peak memory of this process in bytes: of the resident set on a CPU, of torch's allocator on CUDA.

    Metal keeps no peak: on ``mps`` it is what is allocated now.
    """
    kind = str(device).partition(":")[0]
    if kind == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if kind == "mps":
        return torch.mps.current_allocated_memory()
    try:
        # Preferred over getrusage, whose peak a worker inherits from the process that started it.
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            found = re.search(r"^VmHWM:\s+(\d+) kB", status.read(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def keep_freed_memory(weights: int = 0) -> None:
    """Let the C allocator keep what a CPU run frees, for the next micro-batch; ``weights`` are its own, in bytes.

    glibc hands every large tensor back to the kernel when it is freed and has its pages zeroed again for the next:
    a third of the time of a GPT-2 step. Not in torch's huge pages (THP_MEM_ALLOC_ENABLE): steps are as fast without,
    and its aligned blocks leave gaps that glibc fills with fresh memory for another five steps. With more than 1 GiB
    of weights tensors from 32 MiB on are still handed back, a sixth slower: gradients move once into DDP's buckets,
    and what the heap keeps of the first copy is the model's size once more. Other C libraries are left as they are.
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
    """Raise PlanError where torch.compile has no C++ compiler to call (CPU code; a GPU's launchers too)."""
    named = os.environ.get("CXX")
    candidates = [named] if named else ["g++", "clang++", "c++"]
    if not any(shutil.which(name) for name in candidates):
        raise PlanError(
            f"train.compile=true needs a C++ compiler on this machine (looked for {', '.join(candidates)}); install "
            "one (Debian: apt-get install g++), point CXX at it, or leave train.compile=false"
        )


def import_compiler_late() -> None:
    """Keep torch from importing its compiler in this process until something is compiled.

    torch imports it, 1.4 s, to tell it which functions it must not compile: those of optimizers, of modes, of the meta
    device. Where nothing is compiled, these can be called as they are.
    """
    if _COMPILER in sys.modules:
        return
    late = sys.modules[_COMPILER] = _LateCompiler(_COMPILER)
    # Fake tensors read its settings, a file that imports nothing of the compiler.
    spec = spec_from_file_location(f"{_COMPILER}.config", Path(torch.__file__).parent / "_dynamo" / "config.py")
    assert spec is not None and spec.loader is not None  # of a file that ends in .py
    late.config = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(late.config)


_COMPILER = "torch._dynamo"


class _LateCompiler(ModuleType):
    """Stands in for ``torch._dynamo`` until it is asked for anything else."""

    config: ModuleType
    graph_break = "".format  # takes anything and does nothing: there is no graph

    def disable(self, function: Callable | None = None, *args: Any, **kwargs: Any) -> Callable:
        """Leave a function as it is; without one, return a decorator that does."""
        return (lambda decorated: decorated) if function is None else function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # which importing its parts asks for
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(import_module(_COMPILER), name)


# -- numeric formats --------------------------------------------------------------------------------------------------


def best_precision(device_type: str) -> str:
    """Return bf16 where the device computes it in hardware, else fp32.

    On a CPU the environment variable ``CPU_PRECISION`` decides where it is set.
    """
    if device_type == "cuda":
        return "bf16" if torch.cuda.get_device_capability()[0] >= 8 else "fp32"  # Ampere; older cards emulate it
    if device_type == "mps":
        return "fp32"
    # Private names: where torch has them no more, fp32 is used, which is always right.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    fast = any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    chosen = os.environ.get(CPU_PRECISION) or ("bf16" if fast else "fp32")
    if chosen not in ("fp32", "bf16"):
        raise PlanError(f"the environment variable {CPU_PRECISION}={chosen} must be fp32 or bf16, or not set")
    return chosen


def parameter_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights, gradients and optimizer state: bf16 and fp16 are computed under autocast."""
    return torch.float64 if precision == "fp64" else torch.float32


def between_layers(precision: str) -> torch.dtype | None:
    """Return the dtype in which layers pass floating-point tensors on; None where each layer decides by itself.

    Under autocast a residual stream stays in float32. In bf16 it is half as large, in memory and between stages.
    """
    return torch.bfloat16 if precision == "bf16_residual" else None


def autocast(precision: str, device_type: str, keep_casts: bool = True):
    """Return the context for one whole step."""
    if precision not in _COMPUTE:
        return nullcontext()
    return torch.autocast(device_type, dtype=_COMPUTE[precision], cache_enabled=keep_casts)


def outside_autocast(device_type: str):
    """Return the context for a backward within a step's ``autocast``, where gradients get the dtype of their forward.

    Autocast would compute those of a layer in bf16 that keeps itself in float32. What is recomputed in a backward
    enters the forward's autocast by itself.
    """
    return torch.autocast(device_type, enabled=False)
