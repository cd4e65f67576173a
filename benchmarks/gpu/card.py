"""What the GPU is and what it can do at best: versions, bandwidth, products of matrices."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpt2 import datasheet_peak, measured_peak
from benchmarks.timing import take_turns
from parallel.devices import synchronize
from training.reporting import describe

_SMI = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory")
_PACKAGES = ("triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "hydra-core")


def facts(toy: bool) -> Iterator[dict]:
    """Yield one row per fact."""
    machine = describe()
    found = {"python": machine["python"], "torch": torch.__version__, "cuda": torch.version.cuda}
    if not toy:
        card = torch.cuda.get_device_properties(0)
        found |= {
            "GPU": card.name,
            "GPUs": torch.cuda.device_count(),
            "compute capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
            "memory, GiB": f"{card.total_memory / 2**30:.1f}",
            "cudnn": torch.backends.cudnn.version(),
        }
        found |= _from_driver()
    found |= {name: version for name in _PACKAGES if (version := _version(name))}
    found |= {"CPU": machine["cpu"]["model"], "cores": machine["cpu"]["cores"]}
    for what, value in found.items():
        yield {"what": what, "value": value}


def peaks(toy: bool) -> Iterator[dict]:
    """Yield one row per measurement: the best of twenty."""
    device = torch.device("cpu" if toy else "cuda")
    size = 2**16 if toy else 2**30
    here = torch.ones(size, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    seconds = _fastest(lambda: there.copy_(here), device)
    # Each byte is read once and written once.
    yield _row("copy within the device's memory", 2 * size / seconds / 1e9, "GB/s")
    host = torch.ones(size // 4, dtype=torch.uint8)
    host = host if toy else host.pin_memory()
    for name, source, target in (("to", host, here[: len(host)]), ("from", here[: len(host)], host)):
        seconds = _fastest(lambda s=source, t=target: t.copy_(s), device)
        yield _row(f"copy {name} the device, pinned memory", len(host) / seconds / 1e9, "GB/s")
    datasheet = None if toy else datasheet_peak()
    width = 64 if toy else 8192
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        reached = measured_peak(device.type, width, dtype)
        share = f"{reached / datasheet:.1%}" if datasheet and dtype.itemsize == 2 else ""
        yield _row(f"product of {width} x {width} matrices, {str(dtype)[6:]}", reached / 1e12, "TFLOP/s", share)
    if not toy:
        torch.backends.cuda.matmul.allow_tf32 = True
        reached = measured_peak("cuda", width, torch.float32)
        yield _row(f"product of {width} x {width} matrices, tf32", reached / 1e12, "TFLOP/s")


def _row(what: str, value: float, unit: str, share: str = "") -> dict:
    return {"what": what, "value": f"{value:.4g}", "unit": unit, "of the datasheet": share}


def _fastest(operation: Callable[[], object], device: torch.device) -> float:
    def step(number: int) -> None:
        operation()
        synchronize(device)

    return min(take_turns({"": step}, 20, warm_up=3)[""])


def _from_driver() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_SMI, answer.strip().split(", "), strict=False))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
