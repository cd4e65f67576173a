"""Checks the data set: its splits, a sample, and the number of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from common.errors import DataError
from conf.instantiate import build
from data.dataset import Batch, Source

if TYPE_CHECKING:
    from training.run.setup import Setup


def check_splits(setup: Setup) -> None:
    """Check the splits and the description that the data set's ``prepare()`` has set. Raises DataError."""
    data = setup.data
    for split in ("train", "valid", "test"):
        source = getattr(data, split, ...)
        if not isinstance(source, Source) and (split == "train" or source is not None):
            left = f"no {split}" if source is ... else f"{split}={str(source):.60}"
            raise DataError(
                f"{type(data).__name__}.prepare() left {left}; it must leave a data.dataset.Source, such as "
                "InMemory(inputs, targets), in train, valid and test (or None in the last two)"
            )
    if not isinstance(getattr(data, "description", None), str):
        raise DataError(f"{type(data).__name__}.prepare() left no description: one line that says what the data is")


def check_read(setup: Setup) -> None:
    """Check the result of reading one sample. Raises DataError."""
    source, first = setup.data.train, np.zeros(1, dtype=np.int64)
    given = source.read(first, 0)
    if isinstance(given, (tuple, list)) and len(given) in (2, 3):
        tensors = Batch(*given).tensors + (*given[2:],)
        if len(tensors) > 1 and all(isinstance(t, Tensor) and t.dim() > 0 and len(t) == 1 for t in tensors):
            again = source.read(first, 0)
            if any(map(_differ, tensors, Batch(*again).tensors + (*again[2:],))):
                raise DataError(
                    f"{type(source).__name__}.read() returned another sample for the same index the second time; it "
                    "must depend on its arguments only, so that a run can be repeated, resumed and divided. Draw from "
                    "a generator that is seeded by (epoch, index)"
                )
            return
    kinds = ", ".join(map(_kind, given if isinstance(given, (tuple, list)) else [given]))
    raise DataError(
        f"{type(source).__name__}.read() returned {kinds} for one index; it must return (inputs, targets): tensors "
        "with one row for each index, or tuples of them"
    )


def _differ(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ in shape or in any bit, including the bits of a NaN."""
    bits, others = (t.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for t in (tensor, other))
    return tensor.shape != other.shape or not torch.equal(bits, others)


def _kind(given: Any) -> str:
    return f"a tensor {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"


def check_length_of_run(setup: Setup) -> None:
    """Count the steps of the run. Raises UserError if data or schedule do not allow them."""
    build("scheduler", setup.cfg.scheduler).factor(1, setup.total_steps, setup.per_epoch)
