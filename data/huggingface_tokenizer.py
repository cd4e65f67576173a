"""GPT-2's tokenizer as Hugging Face writes it beside a model: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path

from common.files import parse_json, read_regular
from data.vocabulary import END_OF_TEXT, GPT2_VOCAB_SIZE, published_encoder, published_merges

_TOKENIZER, _ADDED = "tokenizer.json", "added_tokens.json"


def tokenizer_files(extra: tuple[str, ...], positions: int) -> dict[str, str]:
    """Returns the files' contents by name.

    Args:
        extra: Tokens behind GPT-2's own, the first of which is 50,257.
        positions: The longest sequence that the model takes, in tokens.
    """
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added("<|endoftext|>", END_OF_TEXT, special=True),
            *(_added(token, GPT2_VOCAB_SIZE + i, special=False) for i, token in enumerate(extra)),
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
    """Returns the tokens behind GPT-2's own of a Hugging Face tokenizer, in the order of their numbers.

    Args:
        folder: Where the tokenizer is. The result is empty where there is none that can be read.
    """
    try:
        if (folder / _TOKENIZER).exists():
            entries = parse_json(read_regular(folder / _TOKENIZER))["added_tokens"]
            numbers = {entry["content"]: entry["id"] for entry in entries}
        elif (folder / _ADDED).exists():
            numbers = dict(parse_json(read_regular(folder / _ADDED)))
        else:
            return {}
        behind = [(number, token) for token, number in numbers.items() if number >= GPT2_VOCAB_SIZE]
        return {token: number for number, token in sorted(behind)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _added(token: str, number: int, special: bool) -> dict:
    return {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }
