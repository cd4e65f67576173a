"""Words by the basic-English rules, and the vocabulary that a text's words make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path

import numpy as np

from common.errors import DataError
from data.documents import Document

UNKNOWN = "<unk>"
_FILE = "vocabulary.txt"

# In this order. Source: torchtext.data.utils.get_tokenizer("basic_english").
_REPLACEMENTS = (
    ("'", " '  "),
    ('"', ""),
    (".", " . "),
    ("<br />", " "),
    (",", " , "),
    ("(", " ( "),
    (")", " ) "),
    ("!", " ! "),
    ("?", " ? "),
    (";", " "),
    (":", " "),
)


class WordVocabulary:
    """The words of a text's training split, most frequent first after <unk>.

    key    names what its tokens depend on besides the text
    size   the number of words; words: by token; label: in a description. None before load()
    """

    size: int | None = None
    words: list[str] | None = None
    label: str | None = None
    start = None  # no token marks the beginning of a text

    def __init__(self, min_frequency: int = 1, max_size: int | None = None):
        """See choose_words. Raises DataError for a frequency below 1 and for a size below 2."""
        if min_frequency < 1:
            raise DataError(f"data.min_frequency={min_frequency}: a word that is kept occurs at least once")
        if max_size is not None and max_size < 2:
            raise DataError(f"data.max_vocabulary={max_size}: a vocabulary has at least {UNKNOWN} and one word")
        self.min_frequency, self.max_size = min_frequency, max_size
        self.key = f"basic_english {min_frequency} {max_size}"

    def encode(
        self, folder: Path, documents: Mapping[str, Sequence[Document]]
    ) -> tuple[int, dict[str, Iterator[np.ndarray]]]:
        """The size and each split's tokens, as cached_tokens takes them; writes the words to the folder."""
        words = choose_words(count_words(documents["train"]), self.min_frequency, self.max_size)
        (folder / _FILE).write_text("\n".join(words) + "\n", encoding="utf-8")
        return len(words), {split: encode_words(part, words) for split, part in documents.items()}

    def load(self, folder: Path) -> None:
        """Reads the words that encode() wrote."""
        self.words = (folder / _FILE).read_text(encoding="utf-8").split()
        self.size = len(self.words)
        self.label = f"{self.size:,} words"

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text's words by token, <unk> for those that it lacks. To be called after load()."""
        tokens = {word: token for token, word in enumerate(self.words)}
        return [[tokens.get(word, 0) for word in basic_english(text)] for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """The words with a space between them, lower-cased as they are. To be called after load()."""
        return " ".join(self.words[token] for token in tokens)


def basic_english(text: str) -> list[str]:
    """The lower-cased words of a text, any number of lines: "It's (here)." gives it ' s ( here ) .

    Double quotes are dropped without a gap, semicolons and colons with one; other signs of punctuation are
    words of their own.
    """
    text = text.lower()
    for sign, replacement in _REPLACEMENTS:
        text = text.replace(sign, replacement)
    return text.split()


def count_words(documents: Iterable[Document]) -> Counter[str]:
    """How often each word occurs in the documents."""
    counts: Counter[str] = Counter()
    for document in documents:
        for piece in document.pieces():
            counts.update(basic_english(piece))
    return counts


def choose_words(counts: Counter[str], min_frequency: int = 1, max_size: int | None = None) -> list[str]:
    """The vocabulary, by token: <unk>, then the words from the most frequent on, equals by the alphabet.

    min_frequency: words that occur less often are left out. max_size: words at most, <unk> included.
    Source: torchtext.vocab.build_vocab_from_iterator(specials=["<unk>"]).
    """
    kept = (item for item in counts.items() if item[1] >= min_frequency and item[0] != UNKNOWN)
    by_frequency = sorted(kept, key=lambda item: (-item[1], item[0]))
    return [UNKNOWN, *(word for word, _ in by_frequency)][:max_size]


def encode_words(documents: Iterable[Document], words: Sequence[str]) -> Iterator[np.ndarray]:
    """The documents' tokens in order, as int64 arrays; a word outside the vocabulary is token 0, <unk>.

    Nothing marks the end of a line or of a document, as published.
    """
    tokens = {word: token for token, word in enumerate(words)}
    for document in documents:
        for piece in document.pieces():
            found = basic_english(piece)
            yield np.fromiter(map(tokens.get, found, repeat(0)), dtype=np.int64, count=len(found))
