"""What the text data sets share: documents in, tokens in a cache, windows of seq_len tokens out."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from common.errors import DataError
from data.columns import ColumnWindows
from data.dataset import DataSet
from data.documents import Document, split_by_position, text_problem
from data.tokens import TokenWindows, cached_tokens, count_tokens
from data.vocabulary import GPT2Vocabulary
from data.words import WordVocabulary

# To be raised when the same documents give other tokens: old caches are then left alone, not misread.
_CACHE_FORMAT = 1
_MINIMUM_DOCUMENTS = 20


class LanguageData(DataSet):
    """Text as tokens: GPT-2's, or the words of the training split by the basic-English rules.

    vocab_size   for words None before prepare(), because the text decides
    words        after prepare(), for words: each by its token; None for GPT-2's tokens
    """

    name: str
    min_word_frequency = 5

    def __init__(
        self,
        seq_len: int = 256,
        cache_dir: str | None = None,
        num_workers: int = 0,
        vocabulary: Literal["gpt2", "words"] = "gpt2",
        min_frequency: int | None = None,
        max_vocabulary: int | None = None,
        batchify: bool = False,
        columns: int | None = None,
        extra_tokens: Any = None,
    ):
        """seq_len: tokens per sample. cache_dir: where the tokens are kept; None: the user's cache folder.

        vocabulary:     gpt2 | words
        min_frequency:  words that occur less often in the training split are <unk>; None: the data set's
                        min_word_frequency
        max_vocabulary: so many words at most, the most frequent, <unk> included; None: all of them
        batchify:       train on the text in order, in `columns` columns (see ColumnWindows), instead of on
                        shuffled samples
        extra_tokens:   tokens behind GPT-2's own (see data.extra_tokens)
        Raises DataError for a number that makes no sense, and for one that belongs to another choice.
        """
        super().__init__(num_workers)
        if seq_len < 1:
            raise DataError(f"data.seq_len={seq_len}: a sample needs at least 1 token")
        if batchify and columns is None:
            raise DataError("data.batchify=true needs data.columns, which is the global batch size")
        self.seq_len = seq_len
        self.cache_dir = cache_dir
        self.columns = columns if batchify else None
        self.vocabulary = self._choose(vocabulary, min_frequency, max_vocabulary, extra_tokens)
        self._prepared = False

    def _choose(
        self, name: str, min_frequency: int | None, max_size: int | None, extra_tokens: Any
    ) -> WordVocabulary | GPT2Vocabulary:
        if name == "words":
            if extra_tokens:
                raise DataError(
                    "model.extra_tokens grows GPT-2's vocabulary, and data.vocabulary=words takes its words from the "
                    "text; use data.vocabulary=gpt2, or leave model.extra_tokens out"
                )
            return WordVocabulary(self.min_word_frequency if min_frequency is None else min_frequency, max_size)
        if name != "gpt2":
            raise DataError(f"data.vocabulary={name} is not one of gpt2, words")
        for key, value in (("min_frequency", min_frequency), ("max_vocabulary", max_size)):
            if value is not None:
                raise DataError(
                    f"data.{key}={value} chooses among words, and GPT-2's vocabulary is fixed; leave it out or "
                    "set data.vocabulary=words"
                )
        return GPT2Vocabulary(extra_tokens)

    @property
    def vocab_size(self) -> int | None:
        return self.vocabulary.size

    @property
    def words(self) -> list[str] | None:
        return self.vocabulary.words

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens. To be called after prepare()."""
        return self.vocabulary.decode(tokens)

    @abstractmethod
    def documents(self) -> Mapping[str, Sequence[Document]]:
        """The text of "train", "valid" and "test". Raises DataError if there is none."""

    @abstractmethod
    def title(self) -> str:
        """What the text is, in a few words, for the description."""

    def prepare(self) -> None:
        """Encodes the text, unless that was done before: the cache goes by a hash of the text itself."""
        if self._prepared:
            return
        documents = self.documents()
        files = cached_tokens(
            self.cache_dir,
            f"{self.name}-{_fingerprint(documents, self.vocabulary.key)}",
            lambda folder: self.vocabulary.encode(folder, documents),
        )
        self.vocabulary.load(files["train"].parent)
        self.train = self._train(files["train"])
        self.valid, self.test = (
            TokenWindows(files[split], self.seq_len) if count_tokens(files[split]) > self.seq_len else None
            for split in ("valid", "test")
        )
        self.description = self._describe(documents, files)
        self._prepared = True

    def _train(self, path: Path) -> TokenWindows:
        tokens = count_tokens(path)
        if tokens <= self.seq_len:
            raise DataError(
                f"the train split of {self.title()} has {tokens:,} tokens; one sample of "
                f"data.seq_len={self.seq_len} needs {self.seq_len + 1}. Lower data.seq_len or give more text"
            )
        if self.columns is not None:
            return ColumnWindows(path, self.columns, self.seq_len)
        return TokenWindows(path, self.seq_len)

    def _describe(self, documents: Mapping[str, Sequence[Document]], files: Mapping[str, Path]) -> str:
        parts = []
        for split, source in (("train", self.train), ("valid", self.valid), ("test", self.test)):
            tokens = count_tokens(files[split])
            samples = f"{len(source):,} samples" if source else f"one sample needs {self.seq_len + 1:,}"
            parts.append(f"{split} {tokens:,} tokens ({samples})")
        count = sum(len(part) for part in documents.values())
        columns = "" if self.columns is None else f", trained on in {self.columns} columns"
        return f"{self.title()}, {count:,} documents, {self.vocabulary.label}{columns}: {', '.join(parts)}"


def split_documents(documents: Sequence[Document]) -> dict[str, list[Document]]:
    """About 90 % of the text to train on and 5 % each to validate and test, the same documents every time.

    From 20 documents on, of every 20 the 10th goes to valid and the 20th to test. With fewer, each document
    is cut at its 90 % and 95 % instead.
    """
    if len(documents) >= _MINIMUM_DOCUMENTS:
        chosen = {"valid": documents[9::20], "test": documents[19::20]}
        rest = [document for i, document in enumerate(documents) if i % 20 not in (9, 19)]
        return {"train": rest, **{split: list(part) for split, part in chosen.items()}}
    cut = [split_by_position(document, (0.90, 0.05, 0.05)) for document in documents]
    names = ("train", "valid", "test")
    return {split: [parts[i] for parts in cut if len(parts[i])] for i, split in enumerate(names)}


def only_text(documents: Sequence[Document]) -> tuple[list[Document], list[str]]:
    """The documents that are UTF-8 text, and for each of the others its path and what is wrong with it."""
    good, bad = [], []
    for document in documents:
        problem = text_problem(document)
        if problem is None:
            good.append(document)
        else:
            bad.append(f"{document.path}: {problem}")
    return good, bad


def _fingerprint(documents: Mapping[str, Sequence[Document]], vocabulary: str) -> str:
    """A hash of what the tokens depend on: text, its cut into documents and splits, vocabulary, format."""
    whole = hashlib.sha256(f"{_CACHE_FORMAT} {vocabulary}".encode())
    for split in sorted(documents):
        whole.update(f" {split} {len(documents[split])}".encode())
        for document in documents[split]:
            content = hashlib.sha256()
            for block in document.blocks():
                content.update(block)
            whole.update(content.digest())
    return whole.hexdigest()[:16]
