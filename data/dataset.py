"""The interface of every `data=` option: a DataSet has splits, which are Sources of samples by index.

A Batch is the data of a replica for one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from common.errors import DataError
from common.files import expand_home

if TYPE_CHECKING:
    from data.vocabulary import Vocabulary
    from data.words import WordVocabulary


PADDING_TARGET = -100  # torch's ignore_index, a target that does not count in the loss
Given = Tensor | np.ndarray
Rows = tuple[Tensor | tuple[Tensor, ...], Tensor | tuple[Tensor, ...]]  # inputs and targets


def mapped(change: Callable[[Any], Any], tensors: Any) -> Any:
    """Return the result of ``change`` for a tensor, or for each tensor of a tuple."""
    return tuple(map(change, tensors)) if isinstance(tensors, tuple) else change(tensors)


@dataclass
class Batch:
    """A batch of b samples.

    Attributes:
        inputs: [b, ...], or a flat tuple of such tensors if a model has several inputs.
        targets: [b, ...], or a flat tuple of such tensors if a model has several targets.
        documents: [b, t] int64, where the document of each token begins in its row. None if each row is one document.
        weights: [b] float, or None if every sample counts 1. 0.0 marks a sample that only fills up the last evaluation
            batch and must not count.
    """

    inputs: Tensor | tuple[Tensor, ...]
    targets: Tensor | tuple[Tensor, ...]
    documents: Tensor | None = None
    weights: Tensor | None = None

    @property
    def input_tensors(self) -> tuple[Tensor, ...]:
        """The inputs as a tuple, even if they are a single tensor."""
        return self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)

    @property
    def target_tensors(self) -> tuple[Tensor, ...]:
        """The targets as a tuple, even if they are a single tensor."""
        return self.targets if isinstance(self.targets, tuple) else (self.targets,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Inputs and targets."""
        return *self.input_tensors, *self.target_tensors

    @property
    def terms(self) -> int:
        """The number of elements of all targets."""
        return sum(targets.numel() for targets in self.target_tensors)

    @property
    def others(self) -> dict[str, Tensor]:
        """All that is not None beside the inputs, by name."""
        return {name: given for name, given in vars(self).items() if name != "inputs" and given is not None}

    def __len__(self) -> int:
        return len(self.target_tensors[0])

    def map(self, change: Callable[[Any], Any]) -> Batch:
        """Return a batch of the results of ``change`` for each tensor."""
        more = (None if given is None else change(given) for given in (self.documents, self.weights))
        return Batch(mapped(change, self.inputs), mapped(change, self.targets), *more)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on a device; with ``non_blocking`` copies of pinned memory overlap with computation."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def to_arrays(self) -> Batch:
        """Return the same batch for another process: of each tensor [its dtype, its bytes as a numpy array]."""
        return self.map(lambda tensor: [tensor.dtype, tensor.contiguous().view(torch.uint8).numpy()])

    def to_tensors(self) -> Batch:
        """Return the batch that ``to_arrays`` converted. Its tensors use the memory of the arrays."""
        return self.map(lambda stored: torch.from_numpy(stored[1]).view(stored[0]))

    def pin_memory(self) -> Batch:
        """Return the same batch in page-locked memory (needs an accelerator)."""
        return self.map(lambda tensor: tensor.pin_memory())

    def chunks(self, n: int) -> list[Batch]:
        """Return n contiguous micro-batches of b / n samples each (views, no copies)."""
        if n < 1 or len(self) % n:
            raise ValueError(f"a batch of {len(self)} samples cannot be cut into {n} equal micro-batches")
        size = len(self) // n
        return [self.map(lambda tensor, at=i * size: tensor[at : at + size]) for i in range(n)]


class Source(ABC):
    """One split of a data set, with random access.

    Attributes:
        ordered: Whether training uses the samples in order in every epoch instead of shuffling them.
        augment: Changes samples to train on, if it is not None. Samples that validate a fold are read without it.
        endless: Whether training reads on after the last sample, at the indices len(self), len(self) + 1, ...
    """

    ordered: bool = False
    augment: Any = None
    endless: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def read(self, indices: np.ndarray, epoch: int) -> Any:
        """Return samples as (inputs [b, ...], targets [b, ...]); a tuple of either if a model has several.

        If rows have several documents, the third item is ``Batch.documents``. This is a pure function: augmentation, if
        any, depends only on (seed, epoch, index).

        Args:
            indices: int64 [b], each in [0, len).
            epoch: The epoch, from 0 on.
        """

    def ids(self, indices: np.ndarray) -> list | None:
        """Return the names or numbers by which the data know samples, for predictions; None if there are none."""
        return None

    def unaugmented(self) -> Source:
        """Return these samples without augmentation."""
        unchanged = copy(self)
        unchanged.augment = None
        return unchanged

    def check_batch(self, global_batch_size: int) -> None:
        """Check that training can use batches of this size. All sizes are allowed unless this is overridden.

        Raises:
            DataError: If it cannot.
        """
        return


def check_at_least(least: int, **options: float) -> None:
    """Raise DataError with the name of the key if an option of a data set is below ``least``."""
    for name, value in options.items():
        if value < least:
            raise DataError(f"data.{name}={value}: it must be at least {least}")


def check_fractions(fractions: Mapping[str, float], prefix: str = "") -> None:
    """Raise DataError with the keys if fractions to hold out are negative, or leave nothing to train on."""
    if min(fractions.values(), default=0) < 0 or sum(fractions.values()) >= 1:
        named = " and ".join(f"{prefix}{key}={value}" for key, value in fractions.items())
        raise DataError(f"{named} must be 0 or more, and less than 1 together")


def by_part(starts: np.ndarray, positions: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (part, indices): a part that contains some of ``positions``, [b], and the indices of these positions.

    ``starts``, [parts + 1], has the first position of each part, and the end of the last part.
    """
    part_of = np.searchsorted(starts, positions, side="right") - 1
    for part in np.unique(part_of).tolist():
        yield part, np.flatnonzero(part_of == part)


def given_path(root: str | None, needed: str) -> Path:
    """Return ``data.root`` as an absolute path. Raises DataError with the message ``needed`` if it is not set."""
    if not root:
        raise DataError(needed)
    return expand_home(root).absolute()


def once(prepare: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let ``prepare`` do nothing once it has succeeded."""

    @wraps(prepare)
    def prepare_once(self: DataSet) -> None:
        if not self._prepared:
            prepare(self)
            self._prepared = True

    return prepare_once


def to_tensor(name: str, given: Any) -> Tensor:
    """Return a tensor or an array, [n, ...], as a tensor on the CPU, with the same memory if possible.

    Raises:
        DataError: If it is neither, or its numbers are not of a dtype for training. The message has ``name``.
    """
    if isinstance(given, np.ndarray) and not given.dtype.isnative:
        given = given.astype(given.dtype.newbyteorder("="))
    try:
        tensor = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name}: {type(given).__name__} is not a tensor ({error}); give a torch.Tensor or a numpy array of "
            "numbers, or a tuple of them for a model with several inputs or targets"
        ) from None
    if tensor.dim() == 0:
        raise DataError(f"{name}: a single number has no samples; give a tensor whose first dimension counts them")
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has hardly any operators for these
        tensor = tensor.to(torch.int64)
    dense = tensor.layout is torch.strided and not tensor.is_quantized
    if not dense or tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize < 2):
        raise DataError(
            f"{name}: {'' if dense else 'sparse or quantized '}{str(tensor.dtype).removeprefix('torch.')} cannot be "
            "trained on; give a dense tensor of float32 (or float16, bfloat16, float64) or of whole numbers"
        )
    return tensor


def widened(targets: Tensor) -> Tensor:
    """Return targets with whole numbers, such as classes, as int64."""
    return targets if targets.is_floating_point() else targets.long()


class InMemory(Source):
    """Samples that are held as tensors. Arrays become tensors.

    Attributes:
        inputs: [n, ...], or a tuple of such tensors if a model has several inputs.
        targets: [n, ...], or a tuple of such tensors if a model has several targets.
    """

    def __init__(self, inputs: Given | tuple[Given, ...], targets: Given | tuple[Given, ...]):
        """Raise DataError if inputs and targets are not tensors or differ in length."""
        self.inputs = mapped(partial(to_tensor, "inputs"), inputs)
        self.targets = mapped(partial(to_tensor, "targets"), targets)
        batch = Batch(self.inputs, self.targets)
        if any(len(tensor) != len(batch) for tensor in batch.tensors):
            sizes = (" and ".join(str(len(t)) for t in each) for each in (batch.input_tensors, batch.target_tensors))
            raise DataError(f"{' inputs and '.join(sizes)} targets; each input needs one target")

    def __len__(self) -> int:
        return len(Batch(self.inputs, self.targets))

    def read(self, indices: np.ndarray, epoch: int) -> Rows:
        """See Source."""
        rows = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        read = Batch(self.inputs, self.targets).map(lambda tensor: tensor[rows])
        return read.inputs, read.targets


def renumbered(names: Sequence[str], others: Sequence[str]) -> int | None:
    """Return the first number that names another class in ``others``; None if the shorter list begins the longer."""
    return next((i for i, (ours, theirs) in enumerate(zip(names, others, strict=False)) if ours != theirs), None)


class DataSet(ABC):
    """A data set that the configuration names. prepare() sets some of the attributes.

    Attributes:
        train: The samples to train on, set by prepare().
        valid: The samples to validate on, set by prepare(). None if there is no such split or it is smaller than one
            sample.
        test: The samples to test on, set by prepare(). None as for ``valid``.
        description: One line that describes the data and the size of each split, set by prepare().
        vocabulary: The conversion of text to tokens and back. None for data that is not language and for tokens of an
            unknown vocabulary.
        vocab_size: The number of distinct tokens. None for data that is not language, and before prepare() if it
            depends on the text (words).
        seq_len: Tokens per sample. None for data that is not language.
        unigram_entropy: The loss, in nats, of a model that only knows the frequencies of the training tokens, set by
            prepare(). A model that has learned more has a lower loss. None for data that is not text.
        fingerprint: A digest of all samples, if prepare() computes one anyway; otherwise empty.
        pairs: Whether a sample is a pair of answers, [2, tokens], for ``model.loss=dpo``.
        packing: Whether, and how, samples are rows that several documents fill (``data.packing``).
        num_workers: Processes that read ahead (see data.loader.train_loader).
        cache_dir: The folder of all cached data and downloads; None for the user's cache folder.
    """

    vocabulary: Vocabulary | WordVocabulary | None = None
    vocab_size: int | None = None
    seq_len: int | None = None
    unigram_entropy: float | None = None
    pairs: bool = False
    packing: bool | str = False
    num_workers: int = 0
    cache_dir: str | None = None
    fingerprint: str = ""
    _prepared = False
    train: Source
    valid: Source | None
    test: Source | None
    description: str

    def __init__(self, num_workers: int = 0, cache_dir: str | None = None):
        """Raise DataError if ``num_workers`` is negative."""
        check_at_least(0, num_workers=num_workers)
        self.num_workers, self.cache_dir = num_workers, cache_dir

    @abstractmethod
    def prepare(self) -> None:
        """Check the data and build caches. Called by the launching process, then by every worker.

        This is fast after the cache has been built. A second call does nothing.

        Raises:
            DataError: If the data is wrong or missing. The message has the fix.
        """

    def class_names(self) -> list[str]:
        """Return the names of the classes in the order of their numbers; empty if they have none."""
        return []

    def source_of(self, split: str) -> Source:
        """Return the samples of "train", "val" or "test" as in an evaluation. Raises DataError if there are none."""
        source = {"train": self.train, "val": self.valid, "test": self.test}.get(split)
        if source is None:
            raise DataError(f"predict.split={split}: there are no such samples ({self.description})")
        return source.unaugmented()

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts to continue. The data must have a vocabulary; with words, call prepare() first."""
        assert self.vocabulary is not None
        return self.vocabulary.encode_texts(texts)
