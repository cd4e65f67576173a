"""Losses as sums and counts.

A loss gives ``Sums``: what it added up and over how many terms. Means are taken once, over the global batch,
by whoever knows all of it. That is right for padding, for token budgets and for a short last evaluation batch
alike, and a mean of means is not.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # torch's own ignore_index


class Sums(NamedTuple):
    """What a loss adds up.

    Attributes:
        loss: Scalar, the sum over the terms.
        count: Scalar, the number of terms.
        metrics: One scalar for each name in the loss's ``metrics``, each summed over the same terms.
    """

    loss: Tensor
    count: Tensor
    metrics: tuple[Tensor, ...] = ()

    def stack(self) -> Tensor:
        """[loss, count, *metrics] as one detached vector, to be added up and sent.

        float64; float32 on MPS, which has no float64.
        """
        dtype = torch.float32 if self.loss.device.type == "mps" else torch.float64
        return torch.stack([v.detach().to(dtype) for v in (self.loss, self.count, *self.metrics)])


class Loss(Protocol):
    """What closes a chain. ``metrics`` names the further sums that it gives."""

    metrics: tuple[str, ...]

    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        """Compute the sums.

        Args:
            output: [b, ...] from the last layer.
            targets: [b, ...].
            weights: [b], 0 for samples that do not count; None: all count.
        """
        ...


def per_element(weights: Tensor | None, like: Tensor) -> Tensor:
    """Sample weights [b] (None: all ones), spread over a tensor [b, ...] of loss terms."""
    if weights is None:
        return torch.ones_like(like)
    return weights.to(like.dtype).view(-1, *[1] * (like.dim() - 1)).expand_as(like)


def mask_targets(targets: Tensor, weights: Tensor | None) -> Tensor:
    """Class targets [b, ...] with those of weightless samples (padding) set to ``IGNORED``."""
    if weights is None:
        return targets
    padding = weights.view(-1, *[1] * (targets.dim() - 1)) == 0
    return targets.masked_fill(padding, IGNORED)


class SquaredError:
    """Squared error summed over all elements of output and targets [b, ...].

    The count is their number, so the mean is ``nn.MSELoss``'s.
    """

    metrics: tuple[str, ...] = ()

    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        """See ``Loss``."""
        errors = F.mse_loss(_at_least_float32(output), targets, reduction="none")
        scale = per_element(weights, errors)
        return Sums((errors * scale).sum(), scale.sum())


class OneHotSquaredError:
    """Squared error of logits [b, c] to the one-hot class [b], summed over all c; the count is of samples times c.

    Targets of ``IGNORED`` count nothing.
    """

    metrics: tuple[str, ...] = ()

    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        """See ``Loss``."""
        counted = targets != IGNORED
        output = _at_least_float32(output)
        one_hot = F.one_hot(targets.where(counted, 0), output.shape[1]).to(output.dtype)
        weights = counted.to(output.dtype) if weights is None else weights * counted
        return SquaredError()(output, one_hot, weights)


class ClassCrossEntropy:
    """Cross entropy of logits [b, c] against classes [b], summed over samples, and how many were right.

    Targets of ``IGNORED`` and samples of weight 0 count nothing.
    """

    metrics: tuple[str, ...] = ("accuracy",)

    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        """See ``Loss``."""
        targets = mask_targets(targets, weights)
        loss = F.cross_entropy(_at_least_float32(output), targets, reduction="sum", ignore_index=IGNORED)
        return Sums(loss, (targets != IGNORED).sum(), ((output.argmax(dim=1) == targets).sum(),))


class TokenCrossEntropy:
    """Cross entropy of logits [b, t, v] against next tokens [b, t], summed; the count is of tokens.

    What ``FusedHead.loss`` fuses, for logits that are there already.
    """

    metrics: tuple[str, ...] = ()

    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        """See ``Loss``."""
        targets = mask_targets(targets, weights).flatten()
        logits = _at_least_float32(output.flatten(0, 1))
        loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        return Sums(loss, (targets != IGNORED).sum())


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
