"""Numeric formats: which one a run computes in."""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch

from common.errors import PlanError

_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}
CPU_PRECISION = "CPU_PRECISION"  # an environment variable: what auto is on a CPU, whatever the CPU can do


def resolve_precision(wanted: str, device_type: str) -> str:
    """Replace ``auto`` by bf16 where the device computes it in hardware, else by fp32.

    On a CPU the environment variable ``CPU_PRECISION`` decides where it is set.
    """
    if wanted != "auto":
        return wanted
    forced = os.environ.get(CPU_PRECISION) if device_type == "cpu" else None
    if forced not in (None, "fp32", "bf16"):
        raise PlanError(f"the environment variable {CPU_PRECISION}={forced} must be fp32 or bf16, or not set")
    return forced or ("bf16" if _fast_bf16(device_type) else "fp32")


def _fast_bf16(device_type: str) -> bool:
    if device_type == "cuda":
        return torch.cuda.get_device_capability()[0] >= 8  # Ampere; older cards emulate it
    if device_type == "cpu":
        # Without these fp32 is used, which is always right.
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    return False


def parameter_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights, gradients and optimizer state: bf16 and fp16 are computed under autocast."""
    return torch.float64 if precision == "fp64" else torch.float32


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
