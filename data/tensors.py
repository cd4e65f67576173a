"""A data set of existing tensors or arrays: ``training.train(..., data=TensorData(inputs, targets))``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.errors import DataError
from data.dataset import DataSet, InMemory, to_tensor

_IGNORED = -100  # torch's own ignore_index


class TensorData(DataSet):
    """Samples in two tensors, which are shuffled and divided into splits. Every process of a run holds them once."""

    def __init__(
        self,
        inputs: Tensor | np.ndarray | tuple[Tensor | np.ndarray, ...],
        targets: Tensor | np.ndarray,
        valid: float = 0.1,
        test: float = 0.1,
        vocab_size: int | None = None,
        seed: int = 0,
    ) -> None:
        """Divide the samples.

        Args:
            inputs: [n, ...], or tokens [n, t] if ``vocab_size`` is given; a tuple of such tensors or arrays if a model
                has several inputs.
            targets: [n, ...]; whole numbers, such as classes, become int64.
            valid: The fraction to validate on, in [0, 1).
            test: The fraction to test on, in [0, 1).
            vocab_size: The number of tokens; None for data that is not language.
            seed: The seed of the division.

        Raises:
            DataError: If the tensors or the fractions do not fit together.
        """
        super().__init__()
        if isinstance(inputs, tuple) and not inputs:
            raise DataError("inputs is an empty tuple; give a tensor, or one for each input of the model")
        targets = to_tensor("targets", targets)
        whole = InMemory(inputs, targets if targets.is_floating_point() else targets.long())
        several, targets = whole.inputs if isinstance(whole.inputs, tuple) else (whole.inputs,), whole.targets
        if min(valid, test) < 0 or valid + test >= 1:
            raise DataError(f"valid={valid} and test={test} must be 0 or more, and less than 1 together")
        samples = len(targets)
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
        sizes = [int(valid * samples), int(test * samples)]
        if vocab_size is not None:
            _check_tokens(several, vocab_size)
            if targets.shape == several[0].shape:
                _check_tokens((targets.where(targets != _IGNORED, 0),), vocab_size, "targets")

        def part(rows: Tensor) -> InMemory | None:
            return InMemory(*whole.read(rows.numpy(), epoch=0)) if len(rows) else None

        self.valid, self.test, train = map(part, order.split([*sizes, samples - sum(sizes)]))
        if train is None:
            raise DataError(f"{samples} samples leave none to train on")
        self.train = train
        self.vocab_size, self.seq_len = vocab_size, several[0].shape[1] if vocab_size is not None else None
        counts = ", ".join(f"{name} {size:,}" for name, size in zip(("valid", "test"), sizes, strict=True))
        self.description = f"tensors: train {len(self.train):,} samples, {counts}"
        self.fingerprint = hashlib.sha256(b"".join(_bytes(tensor) for tensor in (*several, targets))).hexdigest()[:16]

    def prepare(self) -> None:
        """Do nothing, because the samples are in memory."""


def _check_tokens(several: Sequence[Tensor], vocab_size: int, name: str = "inputs") -> None:
    for tokens in several:
        if tokens.dim() < 2 or tokens.is_floating_point():
            raise DataError(
                f"vocab_size={vocab_size} means that the {name} are tokens, whole numbers [n, t], but they are "
                f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
            )
        if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise DataError(
                f"the {name} hold tokens from {tokens.min()} to {tokens.max()}, but vocab_size={vocab_size} allows 0 "
                f"to {vocab_size - 1}"
            )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
