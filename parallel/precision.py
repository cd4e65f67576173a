"""Numeric formats: which one a run computes in, and the loss scale that float16 needs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch

_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_precision(wanted: str, device_type: str) -> str:
    """``auto`` -> bf16 where the device multiplies it in hardware, else fp32. Other names stay."""
    if wanted != "auto":
        return wanted
    return "bf16" if _fast_bf16(device_type) else "fp32"


def _fast_bf16(device_type: str) -> bool:
    if device_type == "cuda":
        return torch.cuda.get_device_capability()[0] >= 8  # Ampere; older cards emulate it
    if device_type == "cpu":
        # Private, but in every torch from 2.4 on; a torch without them gets fp32, which is always right.
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    return False


def parameter_dtype(precision: str) -> torch.dtype:
    """Weights, gradients and optimizer state: float64 for fp64, else float32 (bf16 and fp16 are autocast)."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast(precision: str, device_type: str):
    """The context that one whole step runs under, so that each weight is cast once and not once a micro-batch."""
    if precision not in _COMPUTE:
        return nullcontext()
    return torch.autocast(device_type, dtype=_COMPUTE[precision])


@dataclass
class LossScale:
    """Loss scaling for float16: doubled after ``interval`` good steps, halved at a bad one.

    torch's GradScaler looks for infinities one optimizer at a time; with stages on different ranks all of them must
    take the same decision, so it is taken from the step's one agreed flag. Same constants as GradScaler.
    """

    enabled: bool
    scale: float = 65536.0
    good_steps: int = 0
    interval: int = 2000

    @property
    def factor(self) -> float:
        """What the loss is multiplied by before the backward."""
        return self.scale if self.enabled else 1.0

    def update(self, finite: bool) -> None:
        """Once per step, with the same flag on every rank."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps == self.interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
