"""How much memory this process has needed so far."""

from __future__ import annotations

import re
import sys


def peak_memory_bytes(device="cpu") -> int:
    """Peak memory of this process in bytes, as it counts on `device` (a `torch.device` or its name).

    cpu: the resident set's peak. cuda: the peak of torch's allocator on that device. mps: what is
    allocated now, as Metal keeps no peak. Raises `ValueError` for any other kind of device.
    """
    kind = str(device).partition(":")[0]
    if kind == "cpu":
        return _peak_resident_bytes()
    if kind not in ("cuda", "mps"):
        raise ValueError(f"no memory figure for device {str(device)!r}; known are cpu, cuda and mps")
    import torch

    if kind == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return torch.mps.current_allocated_memory()


def _peak_resident_bytes() -> int:
    try:
        # Preferred over getrusage, whose peak a worker inherits from the process that started it.
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return int(re.search(r"^VmHWM:\s+(\d+) kB", status.read(), re.MULTILINE)[1]) * 1024
    except (OSError, TypeError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
