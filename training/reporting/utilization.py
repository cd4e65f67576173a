"""The model FLOPs utilization (MFU) of a run: the FLOPs of its model, as a fraction of what its devices can compute.

    MFU = 3 x (FLOPs of a forward) x samples/s / (devices x peak)

This is the definition of PaLM (Chowdhery et al. 2022, appendix B), whose 6 N + 12 L H Q T per token it gives for a
Transformer: products with weights and all of attention, the masked half included, and a backward of twice the forward.
Recomputed activations do not count, nor do the gradients of frozen weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

import conf


def peak_of(device: str, precision: str) -> float | None:
    """Return the FLOP/s of dense products of a GPU by its data sheet (``conf/cluster/device``); None if unknown.

    Args:
        device: The name that torch reports, such as "NVIDIA H100 80GB HBM3".
        precision: As in ``train.precision``, without auto.
    """
    for path in (Path(conf.__file__).parent / "cluster" / "device").glob("*.yaml"):
        # Not a part of a GPU, or one that is slower than the SXM of its name.
        if re.search(rf"\b{path.stem.upper()}\b(?! (NVL|PCIe)|.* MIG )", device):
            described: Any = OmegaConf.load(path)
            return described.peak.get(precision.removesuffix("_residual"))
    return None


def seconds_at_peak(setup: Any) -> float | None:
    """Return the seconds that a run's devices would need together, at their peak, for one number of a sample's input.

    A number is a token, or a pixel of one channel. None if the peak, or the FLOPs of an operator, are unknown.
    ``setup`` is the run's ``training.run.setup.Setup``.
    """
    plan = setup.plan
    peak = peak_of(torch.cuda.get_device_name() if plan.device_type == "cuda" else plan.device_type, plan.precision)
    of_tf32 = setup.cfg.train.tf32 and plan.precision == "fp32"  # whose peak is not described
    # A reference has no backward.
    if peak is None or of_tf32 or setup.data.pairs or any(work.uncounted for work in setup.work[0]):
        return None
    flops = sum((3 - work.frozen / max(1, work.parameters)) * work.flops + 3 * work.attention for work in setup.work[0])
    devices = len(set(plan.devices)) or min(plan.processes, plan.gpus or plan.processes)
    return flops / setup.some(1).input_tensors[0].numel() / (devices * peak)
