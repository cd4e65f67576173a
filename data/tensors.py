"""Two tensors that exist already, as a data set: for ``training.train(..., data=TensorData(inputs, targets))``."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from common.errors import DataError
from data.dataset import DataSet, InMemory


class TensorData(DataSet):
    """Samples in two tensors, mixed and divided into splits; every process of a run holds them once."""

    def __init__(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        targets: Tensor,
        valid: float = 0.1,
        test: float = 0.1,
        vocab_size: int | None = None,
        seed: int = 0,
    ) -> None:
        """Divides the samples.

        Args:
            inputs: [n, ...], or tokens [n, t] where ``vocab_size`` is given; a tuple of such tensors where a model has
                several inputs.
            targets: [n, ...], classes as int64.
            valid: The fraction to validate on, in [0, 1).
            test: The fraction to test on, in [0, 1).
            vocab_size: The number of tokens; None for data that is not language.
            seed: Of the division.

        Raises:
            DataError: The tensors or the fractions do not fit together.
        """
        super().__init__()
        several = inputs if isinstance(inputs, tuple) else (inputs,)
        for tensor in several:
            if len(tensor) != len(targets):
                raise DataError(f"{len(tensor)} inputs and {len(targets)} targets: each input needs one target")
        if min(valid, test) < 0 or valid + test >= 1:
            raise DataError(f"valid={valid} and test={test} must be 0 or more, and less than 1 together")
        samples = len(targets)
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
        sizes = [int(valid * samples), int(test * samples)]
        *several, targets = (tensor.detach().cpu() for tensor in (*several, targets))

        def part(rows: Tensor) -> InMemory | None:
            chosen = tuple(tensor[rows] for tensor in several)
            whole = chosen if isinstance(inputs, tuple) else chosen[0]
            return InMemory(whole, targets[rows]) if len(rows) else None

        self.valid, self.test, self.train = map(part, order.split([*sizes, samples - sum(sizes)]))
        if self.train is None:
            raise DataError(f"{samples} samples leave none to train on")
        self.vocab_size, self.seq_len = vocab_size, several[0].shape[1] if vocab_size is not None else None
        counts = ", ".join(f"{name} {size:,}" for name, size in zip(("valid", "test"), sizes, strict=True))
        self.description = f"tensors: train {len(self.train):,} samples, {counts}"
        self.fingerprint = hashlib.sha256(b"".join(_bytes(tensor) for tensor in (*several, targets))).hexdigest()[:16]

    def prepare(self) -> None:
        """Does nothing: the samples are there."""


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
