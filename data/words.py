"""Words by the basic-English rules, and the vocabulary of a text's words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path

import numpy as np

from data.documents import Document

UNKNOWN = "<unk>"
_FILE = "vocabulary.txt"

# These are applied in this order. Source: torchtext.data.utils.get_tokenizer("basic_english").
_REPLACEMENTS = {"'": " '  ", '"': "", "<br />": " ", ";": " ", ":": " "}
_REPLACEMENTS |= {sign: f" {sign} " for sign in ".,()!?"}  # these signs are words


class WordVocabulary:
    """The words of a text's training split: <unk>, then the most frequent first.

    Attributes:
        key: The settings on which the tokens depend in addition to the text, for the cache.
        size: The number of words. None before load().
        words: The words by their token. Empty before load().
        label: The name of the words in a description of the data. None before load().
        end: The token after a text; None, because words have none.
    """

    size: int | None = None
    words: Sequence[str] = ()
    label: str | None = None
    end = None

    def __init__(self, min_frequency: int = 1, max_size: int | None = None):
        """See choose_words."""
        self.min_frequency, self.max_size = min_frequency, max_size
        self.key = f"basic_english {min_frequency} {max_size}"

    def encode(
        self, folder: Path, documents: Mapping[str, Sequence[Document]]
    ) -> tuple[int, dict[str, Iterator[np.ndarray]]]:
        """Write the words to a folder; return their number and each split's tokens, for cached_tokens."""
        words = choose_words(count_words(documents["train"]), self.min_frequency, self.max_size)
        (folder / _FILE).write_text("\n".join(words) + "\n", encoding="utf-8")
        return len(words), {split: encode_words(part, words) for split, part in documents.items()}

    def load(self, folder: Path) -> None:
        """Read the words that encode() wrote."""
        self.words = (folder / _FILE).read_text(encoding="utf-8").split()
        self.size = len(self.words)
        self.label = f"{self.size:,} words"

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text's words, 0 for unknown words. Call load() first."""
        tokens = {word: token for token, word in enumerate(self.words)}
        return [[tokens.get(word, 0) for word in basic_english(text)] for text in texts]

    def files(self, positions: int) -> dict[str, str]:
        """Return the list of words as a file, by its name. Call load() first."""
        return {_FILE: "\n".join(self.words) + "\n"}

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the words of some tokens, separated by spaces. Call load() first."""
        return " ".join(self.words[token] for token in tokens)


def basic_english(text: str) -> list[str]:
    """Return the lower-case words of a text of any number of lines.

    "It's (here)." becomes it ' s ( here ) . Double quotes are removed, semicolons and colons become spaces, and other
    punctuation marks are words.
    """
    text = text.lower()
    for sign, replacement in _REPLACEMENTS.items():
        text = text.replace(sign, replacement)
    return text.split()


def count_words(documents: Iterable[Document]) -> Counter[str]:
    """Return how often each word occurs in the documents."""
    return Counter(chain.from_iterable(_words(documents)))


def choose_words(counts: Counter[str], min_frequency: int = 1, max_size: int | None = None) -> list[str]:
    """Return the words by their token: <unk>, then the most frequent first, equally frequent ones by the alphabet.

    Words that occur less often than ``min_frequency`` are left out. ``max_size`` includes <unk> (None: all).
    Source: torchtext.vocab.build_vocab_from_iterator(specials=["<unk>"]).
    """
    kept = (item for item in counts.items() if item[1] >= min_frequency and item[0] != UNKNOWN)
    by_frequency = sorted(kept, key=lambda item: (-item[1], item[0]))
    return [UNKNOWN, *(word for word, _ in by_frequency)][:max_size]


def encode_words(documents: Iterable[Document], words: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield the documents' tokens in order, as int64 arrays; a word outside the vocabulary is token 0, <unk>.

    The end of a line or of a document has no token, as published.
    """
    tokens = {word: token for token, word in enumerate(words)}
    for some in _words(documents):
        yield np.fromiter(map(tokens.get, some, repeat(0)), dtype=np.int64, count=len(some))


def _words(documents: Iterable[Document]) -> Iterator[list[str]]:
    """Yield the words of the documents, those of a piece at a time."""
    return (basic_english(piece) for document in documents for piece in document.pieces())
