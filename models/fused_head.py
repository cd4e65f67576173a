"""The last layer of a language model: it projects onto the vocabulary, and owns the loss over it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.fused_cross_entropy import fused_cross_entropy
from models.losses import IGNORED, Sums, mask_targets


class FusedHead(nn.Module):
    """[b, t, c] -> logits [b, t, vocab_size], through the linear layer ``projection`` that a subclass sets.

    Owns the loss: training never holds float32 logits.
    """

    projection: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        # The weight in the compute dtype, kept between micro-batches. A dict while a step runs, in which no weight
        # changes; None outside of one, so that nothing stale can be used. (The weight's version cannot tell: fused
        # optimizers do not move it.)
        self.step_cache: dict[tuple[torch.device, torch.dtype], Tensor] | None = None

    def hidden(self, x: Tensor) -> Tensor:
        """Return what is projected; a subclass may put a norm here."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, c] -> logits [b, t, vocab_size]."""
        return self.projection(self.hidden(x))

    def loss(self, x: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        """Compute the loss of hidden states [b, t, c] against next tokens [b, t], in the dtype of an autocast."""
        targets = mask_targets(targets, weights).flatten()
        hidden = self.hidden(x).flatten(0, 1)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        linear = self.projection
        loss = fused_cross_entropy(hidden, linear.weight, self._weight_as(hidden.dtype), targets, linear.bias)
        return Sums(loss, (targets != IGNORED).sum())

    def _weight_as(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in the compute dtype: cast once per step, and not once per micro-batch."""
        weight = self.projection.weight.detach()
        if weight.dtype == dtype:
            return weight
        if self.step_cache is None:
            return weight.to(dtype)
        key = weight.device, dtype  # copies of the module on other devices share the dict
        if key not in self.step_cache:
            self.step_cache[key] = weight.to(dtype)
        return self.step_cache[key]
