"""The gradients of one rank's stages: forgotten, scaled, clamped, and their part of the whole model's norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.chain import Chain
from parallel.mesh import Mesh
from parallel.stage import Stage


class Gradients:
    """Those that ``stages`` hold at the moment. ``device``: where the norm's part is wanted."""

    def __init__(self, stages: Sequence[Stage], chain: Chain, mesh: Mesh, device: torch.device) -> None:
        self._stages, self._chain, self._mesh, self._device = stages, chain, mesh, device

    def clear(self) -> None:
        """Replicated ones are views of DDP's buckets and stay so, zeroed: gradients of their own beside the buckets
        would be the model's size in memory once more."""
        present = self._present()
        if self._mesh.dp_group is not None and present:
            torch._foreach_zero_(present)
            return
        for stage in self._stages:
            for parameter in stage.layers.parameters():
                parameter.grad = None

    def multiply(self, factor: float) -> None:
        """Scale every element."""
        present = self._present()
        if present and factor != 1.0:  # a stage may have no parameters
            torch._foreach_mul_(present, factor)

    def clamp(self, limit: float) -> None:
        """Every element to [-limit, limit]."""
        present = self._present()
        if present:
            torch._foreach_clamp_min_(present, -limit)
            torch._foreach_clamp_max_(present, limit)

    def squared_norm(self) -> Tensor:
        """Scalar in ``sum_dtype``: this rank's share of the squared norm. Replicas have equal gradients, so only the
        first adds its own, and the others 0, or NaN where theirs are not finite; a tied parameter adds where it is at
        home."""
        gradients = [
            parameter.grad
            for stage in self._stages
            for name, parameter in stage.layers.named_parameters()
            if parameter.grad is not None and name not in self._chain.tied
        ]
        dtype = sum_dtype(self._device)
        if not gradients:
            return torch.zeros((), dtype=dtype, device=self._device)
        norms = torch._foreach_norm(gradients)
        squares = torch.stack([n.to(self._device, dtype) for n in norms]).square().sum()
        return squares if self._mesh.replica == 0 else squares * 0

    def _present(self) -> list[Tensor]:
        return [p.grad for stage in self._stages for p in stage.layers.parameters() if p.grad is not None]


def sum_dtype(device: torch.device) -> torch.dtype:
    """What sums over ranks are made in."""
    return torch.float32 if device.type == "mps" else torch.float64
