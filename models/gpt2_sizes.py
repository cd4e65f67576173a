"""The sizes of GPT-2 and their published learning rates. Without torch, because configurations use this module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from common.errors import ModelError
from models.huggingface import Family

# Number of parameters -> AdamW's highest rate: table 2.1 of Brown et al. 2020 ("Language Models are Few-Shot
# Learners"), up to 1.3B at the nearest sizes of GPT-2. For smaller models the rate continues in the same way, about as
# 1/sqrt(parameters). Below 5M it is constant.
_RATES = (
    (5e6, 3e-3), (124e6, 6e-4), (355e6, 3e-4), (774e6, 2.5e-4), (1558e6, 2e-4),
    (2.7e9, 1.6e-4), (6.7e9, 1.2e-4), (13e9, 1e-4), (175e9, 6e-5),
)  # fmt: skip
# GPT-2 itself has 50257 words; 50304 = 393 x 128 is faster on every device.
PADDED_TO, VOCABULARY = 128, 50304


@dataclass(frozen=True)
class Size:
    """The sizes of a GPT-2: ``n_embd`` is the width and ``block_size`` the longest sequence, in tokens."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int = 1024
    vocab_size: int = VOCABULARY

    @property
    def parameters(self) -> int:
        """The number of parameters, the tied head counted once."""
        block = 12 * self.n_embd**2 + 13 * self.n_embd
        return (self.vocab_size + self.block_size + 2) * self.n_embd + self.n_layer * block


SIZES = {
    "124M": Size(12, 12, 768),
    "350M": Size(24, 16, 1024),
    "774M": Size(36, 20, 1280),
    "1558M": Size(48, 25, 1600),
    "tiny": Size(6, 4, 64, block_size=256),
}
DEFAULT = "124M"


def with_sizes(size: str, given: Mapping[str, Any], sizes: Mapping[str, Any] = SIZES) -> Any:
    """Return one of ``sizes``, with each given number that is not None. Raise ModelError if the size is unknown."""
    if size not in sizes:
        raise ModelError(f"model.size: Invalid value {size!r}, expected one of [{', '.join(sizes)}]")
    return replace(sizes[size], **{key: value for key, value in given.items() if value is not None})


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    published = config.get("n_inner") == 4 * config.get("n_embd", 0)
    return config | ({"n_inner": "4 n_embd"} if published else {})


GPT2 = Family(
    "gpt2",
    kinds={"GPT2LMHeadModel": {}},
    sizes={
        "n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "block_size": "n_positions",
        "vocab_size": "vocab_size",
    },
    keys={
        "activation_function": ["gelu_new", "gelu_pytorch_tanh"], "layer_norm_epsilon": [1e-5], "n_inner": ["4 n_embd"],
        "scale_attn_weights": [True], "tie_word_embeddings": [True],
        # The order of operations, dropout (model.dropout in this project), and keys that GPT2LMHeadModel does not read.
        **dict.fromkeys((
            "reorder_and_upcast_attn", "resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx", "n_special",
            "predict_special_tokens", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
            "summary_type", "summary_use_proj",
        )),
    },
    unseen=("n_head", "activation_function", "layer_norm_epsilon"),
    complete=_complete,
)  # fmt: skip


def with_defaults(model: Mapping[str, Any]) -> Size:
    """Return the sizes of the GPT-2 that a section ``model`` describes, without its config.json."""
    size = DEFAULT if model["size"] is None else model["size"]
    return with_sizes(size, {field.name: model[field.name] for field in fields(Size)})


def sizes_of(model: Mapping[str, Any], words: int | None = None) -> dict[str, Any]:
    """Return the values for the nulls in a section ``model``.

    If there is a config.json beside the weights ``init_from``, return its sizes. The vocabulary is the data's if that
    is larger, and padded if it has GPT-2's size. Without a config.json, return only the vocabulary.

    Raises:
        ModelError: If config.json describes another kind of model.
    """
    if (sizes := GPT2.beside(model)) is None:
        return {"vocab_size": with_defaults(model).vocab_size}
    rows = max(sizes["vocab_size"], words or 0)
    if rows > VOCABULARY - PADDED_TO:  # in a smaller vocabulary, padding would get a share of the probabilities
        rows = -(-rows // PADDED_TO) * PADDED_TO
    return {**sizes, "vocab_size": rows, **{key: model[key] for key in GPT2.sizes if model[key] is not None}}


def published_rate(parameters: int) -> float:
    """Return AdamW's published rate for a GPT-2 of this many parameters: two digits, by a power law between sizes."""
    at = min(max(parameters, _RATES[0][0]), _RATES[-1][0])
    (x0, y0), (x1, y1) = next((low, high) for low, high in pairwise(_RATES) if at <= high[0])
    rate = y0 * (y1 / y0) ** (math.log(at / x0) / math.log(x1 / x0))
    return float(f"{rate:.1e}")
