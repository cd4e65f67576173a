"""The loss that transformers adds to the loss of a mixture of experts with ``output_router_logits``.

It is one balance for the routers of all layers together. The whole model's ``forward`` computes it from all logits of a
batch. Here each layer attaches the sums of its routers, which give the same loss for the global batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.auxiliary import attach

_KEY = "router_logits"


class Balance:
    """The load-balance loss of a model of transformers."""

    def __init__(self, model: Any) -> None:
        """Find the routers of a model, whose logits the library records (``_can_record_outputs``, 5.24)."""
        recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get(_KEY)
        self._kind, self._index = getattr(recorder, "target_class", ()), getattr(recorder, "index", 0)
        self._top_k, self._factor = model.num_experts_per_tok, model.router_aux_loss_coef

    def watch(self, layer: nn.Module) -> None:
        """Let a layer, which returns hidden states, attach the sums of the routers inside it."""
        logits: list[Tensor] = []

        def note(_module: nn.Module, _given: Any, output: Any) -> None:
            logits.append(output[self._index] if isinstance(output, tuple) else output)

        for module in layer.modules():
            if isinstance(module, self._kind):
                module.register_forward_hook(note)
        layer.register_forward_hook(partial(self._attached, logits))

    def _attached(self, seen: list[Tensor], layer: nn.Module, given: Any, hidden: Tensor) -> Tensor:
        logits, seen[:] = [*seen], []
        if not logits:
            return hidden
        return attach(hidden, _KEY, torch.stack([*map(self._sums, logits)]).sum(dim=0), self._loss)

    def _sums(self, logits: Tensor) -> Tensor:
        """Return [2 experts + 1]: how often experts are chosen, their scores, and the number of tokens [n, experts]."""
        shares = logits.flatten(0, -2).softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        chosen = shares.topk(self._top_k, dim=-1).indices.flatten()
        choices = shares.new_zeros(shares.shape[1]).index_add_(0, chosen, shares.new_ones(len(chosen)))
        return torch.cat((choices, shares.sum(dim=0), shares.new_full((1,), len(shares))))

    def _loss(self, totals: Tensor) -> Tensor:
        experts = len(totals) // 2
        choices, shares, rows = totals.split((experts, experts, 1))
        return self._factor * experts * (choices / rows * (shares / rows)).sum()
