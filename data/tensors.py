"""A data set of existing tensors or arrays: ``training.train(..., data=TensorData(inputs, targets))``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import DataError
from data.dataset import PADDING_TARGET, Batch, Given, InMemory, check_fractions, mapped, to_tensor, widened
from data.folds import Folded

Samples = tuple[Given | tuple[Given, ...], Given | tuple[Given, ...]]  # inputs and targets


class TensorData(Folded):
    """Samples in two tensors. Some are held out. Every process of a run holds them once.

    Attributes:
        rows: {split: its rows of ``inputs`` and ``targets``}, for the splits that were drawn from these.
    """

    def __init__(
        self,
        inputs: Given | tuple[Given, ...],
        targets: Given | tuple[Given, ...],
        valid: float | Samples = 0.1,
        test: float | Samples = 0.1,
        vocab_size: int | None = None,
        seed: int = 0,
        folds: int | None = None,
        fold: int | None = None,
    ) -> None:
        """Divide the samples.

        Args:
            inputs: [n, ...], or tokens [n, t] if ``vocab_size`` is given; a tuple of such tensors or arrays if a model
                has several inputs.
            targets: [n, ...]; whole numbers, such as classes, become int64. A tuple of such tensors or arrays if there
                are several losses (``models.losses.Several``).
            valid: What to validate on: a fraction of these samples in [0, 1), or others, as (inputs, targets).
            test: What to test on, as ``valid``.
            vocab_size: The number of tokens; None for data that is not language.
            seed: The seed by which rows are drawn.
            folds: Into how many folds the samples outside of the test split are dealt; None for no folds.
            fold: The fold that validates in place of ``valid``, from 0 to folds - 1; the others train.

        Raises:
            DataError: If the tensors or the fractions do not fit together.
        """
        super().__init__(folds, fold)
        whole = _samples(inputs, targets, vocab_size)
        others = {"valid": valid, "test": test}
        for split, part in others.items():
            if not isinstance(part, Real) and not (isinstance(part, tuple) and len(part) == 2):
                raise DataError(f"{split} is a {type(part).__name__}; give a fraction, such as 0.1, or a tuple of two")
        given = {split: part for split, part in others.items() if isinstance(part, tuple)}
        fractions = {split: part for split, part in others.items() if not isinstance(part, tuple)}
        check_fractions(fractions)
        shares = dict.fromkeys(given, "as given") | {split: f"{part:g} of all" for split, part in fractions.items()}
        sizes = {split: int(fraction * len(whole)) for split, fraction in fractions.items()}
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
        drawn = order.split([*sizes.values(), len(whole) - sum(sizes.values())])
        self.rows = dict(zip((*sizes, "train"), drawn, strict=True))
        left = torch.cat([self.rows.get("valid", order[:0]), self.rows["train"]])
        if dealt := self.parts(len(left)):
            self.rows |= {split: left[part.row(np.arange(len(part)))] for split, part in dealt.items()}
            given.pop("valid", None)
            shares["valid"] = f"fold {fold} of {folds}"
        parts: dict[str, InMemory] = {split: _Drawn(whole, rows) for split, rows in self.rows.items() if len(rows)}
        if "train" not in parts:
            raise DataError(f"{len(whole)} samples leave none to train on")
        for split, pair in given.items():
            parts[split] = _samples(*pair, vocab_size)
            own, theirs = ([f"{t.dtype} {list(t.shape[1:])}" for t in _tensors(s)] for s in (parts[split], whole))
            if own != theirs:
                raise DataError(f"the rows of {split} are {', '.join(own)}, and those to train on {', '.join(theirs)}")
        self.train, self.valid, self.test = parts["train"], parts.get("valid"), parts.get("test")
        first = _tensors(whole)[0]
        self.vocab_size, self.seq_len = vocab_size, first.shape[1] if vocab_size is not None else None
        counts = ", ".join(f"{split} {len(parts.get(split, ())):,} ({shares[split]})" for split in ("valid", "test"))
        self.description = f"tensors: train {len(self.train):,} samples, {counts}"
        tensors = [tensor for samples in (whole, *(parts[split] for split in given)) for tensor in _tensors(samples)]
        content = b"".join(t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors)
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]

    def prepare(self) -> None:
        """Do nothing, because the samples are in memory."""


class _Drawn(InMemory):
    """Some ``rows`` of samples."""

    def __init__(self, whole: InMemory, rows: Tensor) -> None:
        super().__init__(*whole.read(rows.numpy(), epoch=0))
        self.rows = rows

    def ids(self, indices: np.ndarray) -> list:
        """Return the numbers of the rows in the given tensors, from 0."""
        return self.rows[indices].tolist()


def _samples(inputs: Any, targets: Any, vocab_size: int | None) -> InMemory:
    if any(isinstance(given, tuple) and not given for given in (inputs, targets)):
        raise DataError("inputs or targets are an empty tuple; give a tensor, or one for each input or target")
    samples = InMemory(inputs, mapped(lambda given: widened(to_tensor("targets", given)), targets))
    if vocab_size is not None:
        batch = Batch(samples.inputs, samples.targets)
        _check_tokens(batch.input_tensors, vocab_size)
        alike = [t for t in batch.target_tensors if t.shape == batch.input_tensors[0].shape]
        _check_tokens([t.where(t != PADDING_TARGET, 0) for t in alike], vocab_size, "targets")
    return samples


def _tensors(samples: InMemory) -> tuple[Tensor, ...]:
    return Batch(samples.inputs, samples.targets).tensors


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
