"""The batch: what one replica gets for one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class Batch:
    """A batch of b samples.

    Attributes:
        inputs: [b, ...], or a flat tuple of such tensors where a model has several inputs.
        targets: [b, ...].
        weights: [b] float, or None where every sample counts 1. 0.0 marks a sample that only fills up the last
            evaluation batch and must not count.
    """

    inputs: Tensor | tuple[Tensor, ...]
    targets: Tensor
    weights: Tensor | None = None

    @property
    def input_tensors(self) -> tuple[Tensor, ...]:
        """The inputs as a tuple, also where they are a single tensor."""
        return self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)

    def __len__(self) -> int:
        return len(self.targets)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch whose tensors are what ``change`` gives for these."""
        inputs = tuple(map(change, self.inputs)) if isinstance(self.inputs, tuple) else change(self.inputs)
        return Batch(inputs, change(self.targets), None if self.weights is None else change(self.weights))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on a device; with ``non_blocking`` copies of pinned memory overlap with computation."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def to_arrays(self) -> Batch:
        """Return the same batch as numpy arrays, for another process; ``to_tensors`` is the reverse."""
        return self.map(lambda tensor: tensor.numpy())

    def to_tensors(self) -> Batch:
        """Return the same batch as tensors that share the arrays' memory."""
        import torch

        return self.map(torch.from_numpy)

    def pin_memory(self) -> Batch:
        """Return the same batch in page-locked memory (needs an accelerator)."""
        return self.map(lambda tensor: tensor.pin_memory())

    def chunks(self, n: int) -> list[Batch]:
        """Return n contiguous micro-batches of b / n samples each (views, no copies)."""
        if n < 1 or len(self) % n:
            raise ValueError(f"a batch of {len(self)} samples cannot be cut into {n} equal micro-batches")
        size = len(self) // n
        return [self.map(lambda tensor, at=i * size: tensor[at : at + size]) for i in range(n)]
