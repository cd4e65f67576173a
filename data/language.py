"""The base of the text data sets: documents are converted to cached tokens, and these to windows of seq_len tokens."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from common.errors import DataError
from data.cache import MappedFile
from data.dataset import DataSet, check_at_least, once
from data.documents import Document
from data.packing import PackedRows, Packing, Stream
from data.token_windows import ColumnWindows, TokenWindows, cached_tokens, unigram_entropy
from data.vocabulary import ExtraTokens, Vocabulary, choose_vocabulary
from data.words import WordVocabulary

# Must be increased when the same documents give other tokens, so that old caches are ignored and not misread.
_CACHE_FORMAT = 1


class LanguageData(DataSet):
    """Text as tokens: GPT-2's or a published tokenizer's, or the words of the training split, by basic-English rules.

    Attributes:
        name: The data set's name in the cache.
        title: A few words about the text, for the description.
        min_word_frequency: The default of ``min_frequency``. Rarer words of the training split are <unk>.
        vocab_size: The number of distinct tokens. With words None before prepare(), because it depends on the text.
        columns: The number of columns that training reads side by side; None for shuffled samples.
    """

    name: str
    title: str
    min_word_frequency = 5
    vocabulary: Vocabulary | WordVocabulary
    seq_len: int
    train: TokenWindows | PackedRows
    _trained: MappedFile

    def __init__(
        self,
        seq_len: int = 256,
        vocabulary: Literal["gpt2", "words"] = "gpt2",
        min_frequency: int | None = None,
        max_vocabulary: int | None = None,
        batchify: bool = False,
        columns: int | None = None,
        extra_tokens: ExtraTokens = None,
        tokenizer: str | None = None,
        packing: Packing = False,
        **options: Any,
    ):
        """Check the arguments; prepare() reads the data.

        Args:
            seq_len: Tokens per sample.
            vocabulary: GPT-2's tokens, or the words of the training split.
            min_frequency: Words that occur less often become <unk>. None for 5 (wikitext2: 1, as published).
            max_vocabulary: The largest number of words, including <unk>. None for no limit.
            batchify: Train on the text in order, in columns that are read side by side.
            columns: The number of columns, which is the global batch size. Needed with ``batchify``.
            extra_tokens: Tokens after GPT-2's own (``model.extra_tokens``).
            tokenizer: A folder with a tokenizer.json, or that file, in place of GPT-2's tokens.
            packing: Fill samples with documents, which do not see each other. True for "split".
            options: See DataSet.

        Raises:
            DataError: If a number is out of range, ``columns`` is missing, or an option is for the other vocabulary.
        """
        super().__init__(**options)
        check_at_least(1, seq_len=seq_len)
        if batchify and columns is None:
            raise DataError("data.batchify=true needs data.columns, which is the global batch size")
        if packing and (batchify or vocabulary == "words"):
            raise DataError(
                "data.packing needs the token that ends a document, which words do not have, and fills samples, which "
                "data.batchify=true reads as columns; leave it out, or use data.vocabulary=gpt2 data.batchify=false"
            )
        self.seq_len, self.packing = seq_len, packing
        self.columns = columns if batchify else None
        if vocabulary == "words":
            if extra_tokens or tokenizer is not None:
                raise DataError(
                    "data.vocabulary=words takes its words from the text, but model.extra_tokens grows GPT-2's "
                    "vocabulary and data.tokenizer has its own. Use data.vocabulary=gpt2, or leave out the other two"
                )
            min_frequency = self.min_word_frequency if min_frequency is None else min_frequency
            check_at_least(1, min_frequency=min_frequency)
            check_at_least(2, max_vocabulary=2 if max_vocabulary is None else max_vocabulary)  # <unk> and one word
            self.vocabulary = WordVocabulary(min_frequency, max_vocabulary)
        elif (min_frequency, max_vocabulary) == (None, None):
            self.vocabulary = choose_vocabulary(tokenizer, extra_tokens)
        else:
            raise DataError(
                f"data.min_frequency={min_frequency} and data.max_vocabulary={max_vocabulary} choose among words, but "
                "the vocabulary of GPT-2 or a tokenizer is fixed. Leave them out, or set data.vocabulary=words"
            )

    @property
    def vocab_size(self) -> int | None:
        """The number of distinct tokens."""
        return self.vocabulary.size

    @property
    def unigram_entropy(self) -> float:
        """See DataSet."""
        return unigram_entropy(self._trained.array)

    @abstractmethod
    def documents(self) -> Mapping[str, Sequence[Document]]:
        """Return the documents of "train", "valid" and "test".

        Raises:
            DataError: If there is no text.
        """

    @once
    def prepare(self) -> None:
        """Encode the text, unless the cache has its tokens. Their name in the cache has a hash of the text."""
        documents = self.documents()
        self.fingerprint = _fingerprint(documents, self.vocabulary.key)
        files = cached_tokens(
            self.cache_dir,
            f"{self.name}-{self.fingerprint}",
            lambda folder: self.vocabulary.encode(folder, documents),
        )
        if isinstance(self.vocabulary, WordVocabulary):
            self.vocabulary.load(files["train"].path.parent)
        self._trained, self.train = files["train"], self._train(files["train"])
        self.valid, self.test = (self._samples(files[split]) for split in ("valid", "test"))
        self.description = self._describe(documents, files)

    def _samples(self, file: MappedFile) -> TokenWindows | PackedRows | None:
        if self.packing:
            documents = Stream([file], self.vocabulary.end, self.cache_dir)
            return PackedRows(documents, self.seq_len, self.packing != "whole", self.cache_dir) or None
        return TokenWindows(file, self.seq_len) if file.count > self.seq_len else None

    def _train(self, file: MappedFile) -> TokenWindows | PackedRows:
        if (source := self._samples(file)) is None:
            raise DataError(
                f"the train split of {self.title} has {file.count:,} tokens; one sample of "
                f"data.seq_len={self.seq_len} needs {self.seq_len + 1}. Lower data.seq_len or give more text"
            )
        if self.columns is not None:
            return ColumnWindows(file, self.columns, self.seq_len)
        return source

    def _describe(self, documents: Mapping[str, Sequence[Document]], files: Mapping[str, MappedFile]) -> str:
        parts = []
        for split, source in (("train", self.train), ("valid", self.valid), ("test", self.test)):
            samples = f"{len(source):,} samples" if source else f"one sample needs {self.seq_len + 1:,}"
            parts.append(f"{split} {files[split].count:,} tokens ({samples})")
        # A file is many documents, or one, which may be cut into a part for each split.
        pieces = Counter(document.path for part in documents.values() for document in part).values()
        count = sum(1 if number <= len(documents) else number for number in pieces)
        columns = "" if self.columns is None else f", read in {self.columns} columns"
        columns += f", packed ({self.train.described})" if isinstance(self.train, PackedRows) else ""
        return f"{self.title}, {count:,} documents, {self.vocabulary.label}{columns}: {', '.join(parts)}"


def _fingerprint(documents: Mapping[str, Sequence[Document]], vocabulary: str) -> str:
    """Return a hash of everything on which the tokens depend: text, its documents and splits, vocabulary, format."""
    whole = hashlib.sha256(f"{_CACHE_FORMAT} {vocabulary}".encode())
    for split in sorted(documents):
        whole.update(f" {split} {len(documents[split])}".encode())
        for document in documents[split]:
            content = hashlib.sha256()
            for block in document.blocks():
                content.update(block)
            whole.update(content.digest())
    return whole.hexdigest()[:16]
