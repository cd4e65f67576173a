"""The batch: what one replica gets for one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class Batch:
    """A batch of b samples.

    inputs:  [b, ...]
    targets: [b, ...]
    weights: [b] float, or None where every sample counts 1; 0.0 marks a sample that only fills up the last
             evaluation batch and must not count
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`; `non_blocking` copies overlap with compute if the memory is pinned."""
        return Batch(
            self.inputs.to(device, non_blocking=non_blocking),
            self.targets.to(device, non_blocking=non_blocking),
            None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory (needs an accelerator). The name is DataLoader's protocol."""
        return Batch(
            self.inputs.pin_memory(),
            self.targets.pin_memory(),
            None if self.weights is None else self.weights.pin_memory(),
        )

    def chunks(self, n: int) -> list[Batch]:
        """Cuts the batch into `n` contiguous micro-batches of b / n samples each (views, no copies).

        Raises ValueError if b is not a multiple of n.
        """
        if n < 1 or len(self) % n:
            raise ValueError(f"a batch of {len(self)} samples cannot be cut into {n} equal micro-batches")
        size = len(self) // n
        cuts = [slice(i * size, (i + 1) * size) for i in range(n)]
        return [
            Batch(self.inputs[cut], self.targets[cut], None if self.weights is None else self.weights[cut])
            for cut in cuts
        ]
