"""A computation of the experts of transformers' models, by grouped products (``models.grouped``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.grouped import by_expert, product

NAME = "grouped_products"


def experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute the output of each token's ``chosen`` experts. Only rounding differs from the model's loop over experts.

    The library's wrapper of experts describes their form by attributes (``use_experts_implementation``, 5.24).
    """

    def linear(rows: Tensor, ends: Tensor, name: str) -> Tensor:
        matrices = getattr(self, name)
        y = product(rows, matrices if self.is_transposed else matrices.transpose(1, 2), ends)
        if self.has_bias:
            expert = torch.bucketize(torch.arange(rows.shape[0], device=rows.device), ends, right=True)
            y = y + getattr(self, f"{name}_bias")[expert]
        return y

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        inner = linear(rows, ends, "gate_up_proj" if self.has_gate else "up_proj")
        y = linear(self._apply_gate(inner) if self.has_gate else self.act_fn(inner), ends, "down_proj")
        return self.post_expert_norm(y) if self.has_post_expert_norm else y

    return by_expert(hidden, chosen, weights, len(self.down_proj), compute)


def register() -> None:
    """Make ``NAME`` a value of a configuration's experts_implementation."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
