"""A mixture of data sets, whose samples are drawn in proportion to weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from common.errors import DataError
from data.cache import key_of
from data.dataset import DataSet, Rows, Source, once, renumbered
from data.loader import Joined, VariableLength

_LONGEST = 20_000  # the order of parts repeats after at most about so many samples, if need be with rounded weights


class Mixture(DataSet):
    """Data sets that are trained on together: of a and b with the weights 3 and 1, three of four samples are of a.

    Each next sample is of the part that lags most behind its share, much as in Megatron-LM's blended data sets. Each
    part has its own epochs, and in each of them its own order, a function of (seed, part, epoch). An epoch of the
    mixture is as many samples as all parts have. Evaluations take the samples of one part after the other.

    Attributes:
        parts: {name: data set}.
        weights: {name: weight}.
        first: The first part, whose vocabulary and prompts are those of the mixture.
        num_classes: The largest number of classes of a part; None if there are none.
    """

    def __init__(
        self, parts: Mapping[str, DataSet | tuple[DataSet, float]] | None = None, seed: int = 0, **options: Any
    ):
        """Check the arguments.

        Args:
            parts: {name: a data set, or (a data set, its weight)}. The weight is 1 if it is not given.
            seed: Determines the order of the samples of each part.
            options: See DataSet.

        Raises:
            DataError: There is no part, or a weight is not above 0.
        """
        super().__init__(**options)
        if not parts or not isinstance(parts, Mapping):
            example = "data.parts={wiki: {name: text, root: FOLDER, weight: 3}, code: {name: stdlib}}"
            raise DataError(f"data.parts={parts}: a mixture needs parts by name, such as {example}")
        pairs = {name: part if isinstance(part, tuple) else (part, 1) for name, part in parts.items()}
        self.parts, self.seed = {name: part for name, (part, _) in pairs.items()}, seed
        self.weights = {name: weight for name, (_, weight) in pairs.items()}
        for name, weight in self.weights.items():
            if not isinstance(weight, Real) or isinstance(weight, bool) or not 0 < weight < math.inf:
                raise DataError(f"data.parts.{name}.weight={weight} must be a number above 0")
        self.first = next(iter(self.parts.values()))
        self.seq_len, self.vocabulary = self.first.seq_len, self.first.vocabulary
        self.vocab_size, self.pairs = self.first.vocab_size, self.first.pairs

    @once
    def prepare(self) -> None:
        """Prepare the parts. Raises DataError if a part is wrong, or if they do not fit together."""
        for name, part in self.parts.items():
            with in_part(name):
                part.prepare()
                if part.train.ordered or part.train.endless or isinstance(part.train, VariableLength):
                    raise DataError("batchify, bucket_by_length and mixtures choose whole batches: leave them out here")
                if not len(part.train):
                    raise DataError("there is no sample to train on")
        first, *others = ((name, _facts(part)) for name, part in self.parts.items())
        for name, facts in others:
            for what, value in first[1].items():
                if facts[what] != value:
                    raise DataError(
                        f"{what} is {value} in data.parts.{first[0]} and {facts[what]} in data.parts.{name}, but one "
                        "model is trained on all parts: make them equal"
                    )
        classes = {name: part.class_names() for name, part in self.parts.items()}
        most = max(classes, key=lambda name: len(classes[name]))
        for name, own in classes.items():
            if (number := renumbered(own, classes[most])) is not None:
                raise DataError(
                    f"class {number} is {own[number]!r} in data.parts.{name} and {classes[most][number]!r} in "
                    f"data.parts.{most}, but one model is trained on all parts: give them the same classes (folders), "
                    "in the same order"
                )
        self.train = Mixed({name: part.train for name, part in self.parts.items()}, [*self.weights.values()], self.seed)
        self.valid, self.test = (
            Joined({name: source for name, part in self.parts.items() if (source := getattr(part, split))}) or None
            for split in ("valid", "test")
        )
        self.vocab_size = self.first.vocab_size
        self.num_classes = max(getattr(part, "num_classes", None) or 0 for part in self.parts.values()) or None
        self.fingerprint = " ".join(part.fingerprint for part in self.parts.values())
        self.description = "; ".join(f"{n} ({self.weights[n]:g}): {part.description}" for n, part in self.parts.items())

    def class_names(self) -> list[str]:
        """Return the names of the part with the most classes; the others have the first of these."""
        return max((part.class_names() for part in self.parts.values()), key=len)

    def source_of(self, split: str) -> Source:
        """See DataSet."""
        super().source_of(split)  # raises if no part has samples
        held = {"val": "valid"}.get(split, split)
        return Joined({name: part.source_of(split) for name, part in self.parts.items() if getattr(part, held)})

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """See DataSet."""
        return self.first.encode_prompts(texts)


@contextmanager
def in_part(name: str) -> Iterator[None]:
    """Let a DataError within the block name the part of a mixture."""
    try:
        yield
    except DataError as error:
        raise DataError(f"data.parts.{name}: {error}") from error


class Mixed(Joined):
    """The training samples of a mixture. Sample p, of any number p, is a pure function of (seed, p)."""

    endless = True

    def __init__(self, parts: Mapping[str, Any], weights: Sequence[float], seed: int):
        """Choose the order of parts. It repeats after as many samples as the weights, in whole numbers, add up to."""
        from fractions import Fraction  # takes 5 ms

        super().__init__(parts)
        exact = [Fraction(str(weight)) for weight in weights]  # of 0.1, one tenth
        shares = [weight / sum(exact) for weight in exact]
        size = min(_LONGEST, math.lcm(*(share.denominator for share in shares)))
        counts = [max(1, round(share * size)) for share in shares]
        order, lags, size = [], [0] * len(counts), sum(counts)
        for _ in range(size):
            lags = [lag + count for lag, count in zip(lags, counts, strict=True)]
            order.append(part := lags.index(max(lags)))
            lags[part] -= size
        self._seed, self._counts, self._order = seed, np.array(counts), np.array(order)
        # The number of samples of the same part before each place.
        self._before = np.argsort(np.argsort(order, kind="stable")) - (np.cumsum(counts) - counts)[order]

    def read(self, indices: np.ndarray, epoch: int) -> Rows:
        """See Source."""
        rounds, places = np.divmod(epoch * len(self) + np.asarray(indices, np.int64), len(self._order))
        parts = self._order[places]
        numbers = rounds * self._counts[parts] + self._before[places]
        epochs, rows = np.divmod(numbers, self.lengths[parts])
        return self.read_rows(parts, rows, epochs, self._seed)


def _facts(part: DataSet) -> dict[str, Any]:
    """Return what must be equal in all parts."""

    def described(sample: Any) -> Any:
        return f"{sample.dtype} {list(sample.shape[1:])}" if isinstance(sample, Tensor) else [*map(described, sample)]

    known, sample = part.vocabulary, described(part.train.read(np.zeros(1, np.int64), 0))
    key = key_of(getattr(known, "key", ""), *getattr(known, "words", ()))[:8]
    vocabulary = f"{getattr(known, 'label', None)} ({part.vocab_size}, digest {key})"
    packed = str(bool(part.packing)).lower()
    facts = {"data.seq_len": part.seq_len, "data.packing": packed, "data.chosen": "typed" if part.pairs else None}
    return facts | {"the vocabulary": vocabulary, "a sample": sample}
