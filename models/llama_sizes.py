"""The published sizes of the Llama family, and the sizes in a config.json. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from common.errors import ModelError
from models.gpt2_sizes import with_sizes
from models.huggingface import Family


@dataclass(frozen=True)
class Size:
    """The sizes of a model of the family.

    Attributes:
        n_embd: The width; independent of ``n_head`` times ``head_dim``.
        n_layer: The number of layers.
        n_head: The number of query heads.
        kv_heads: The number of heads of keys and values. n_head / kv_heads query heads use each of them.
        head_dim: The width of a head, even.
        mlp_width: The width between the projections of an MLP.
        vocab_size: The number of words, including padding.
        block_size: The length of the longest sequence, in tokens.
        rope_theta: The base of the rotations' wavelengths.
        rope_scaling: Llama 3's stretching of long wavelengths: factor, low_freq_factor, high_freq_factor and
            original_max_position_embeddings. None if they are not stretched.
        norm_eps: The number added to the mean square in a norm.
        qkv_bias: Whether the projections to queries, keys and values have biases (Qwen2).
        qk_norm: Whether each head's queries and keys are normalized (Qwen3).
        tied: Whether the head and the embedding are one parameter.
        init_std: The standard deviation of the initial weights.
    """

    n_embd: int
    n_layer: int
    n_head: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    block_size: int
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, float] | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = True
    init_std: float = 0.02


LLAMA3 = {
    "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
SIZES = {
    "tiny": Size(128, 4, 4, 2, 32, 384, 50304, 8192),
    "135M": Size(576, 30, 9, 3, 64, 1536, 49152, 8192, 1e5, init_std=0.041666666666666664),
    "360M": Size(960, 32, 15, 5, 64, 2560, 49152, 8192, 1e5),
    "qwen2.5-0.5B": Size(896, 24, 14, 2, 64, 4864, 151936, 32768, 1e6, norm_eps=1e-6, qkv_bias=True),
    "qwen3-0.6B": Size(1024, 28, 16, 8, 128, 3072, 151936, 40960, 1e6, norm_eps=1e-6, qk_norm=True),
    "llama3.2-1B": Size(2048, 16, 32, 8, 64, 8192, 128256, 131072, 5e5, LLAMA3),
    "tinyllama-1.1B": Size(2048, 22, 32, 4, 64, 5632, 32000, 2048, tied=False),
}

KEYS = {  # this project's names: the names in Hugging Face's config.json
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp_width": "intermediate_size",
    "vocab_size": "vocab_size", "block_size": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings", "init_std": "initializer_range", "rope_theta": "rope_theta",
}  # fmt: skip


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    heads, kind = config["num_attention_heads"], config["architectures"][0]  # Family.describe has checked it
    full = {"tie_word_embeddings": False, "initializer_range": 0.02, "rope_theta": 10_000.0}
    full |= {"num_key_value_heads": heads, "head_dim": 128}
    if kind != "Qwen3ForCausalLM":
        full["head_dim"] = config["hidden_size"] // heads
    # As in transformers 5.24: rope_scaling, if there is any, replaces rope_parameters, with its base.
    full |= config | (config.get("rope_scaling") or config.get("rope_parameters", {}))
    full["rope_theta"] = float(full["rope_theta"])
    stretched = full.get("rope_type", full.get("type")) == "llama3"
    full["rope_scaling"] = {key: full[key] for key in LLAMA3} if stretched else None
    full.pop("rope_parameters", None)
    full["layer_types"] = sorted({*full.get("layer_types", ())} or {"full_attention"})
    if full.get("use_sliding_window") is False:
        full.pop("sliding_window", None)
    return full


LLAMA = Family(
    "llama",
    kinds={
        "LlamaForCausalLM": {"qkv_bias": False, "qk_norm": False},
        "Qwen2ForCausalLM": {"qkv_bias": True, "qk_norm": False},
        "Qwen3ForCausalLM": {"qkv_bias": False, "qk_norm": True},
    },
    sizes={**KEYS, "rope_scaling": "rope_scaling"},
    keys={
        "hidden_act": ["silu"], "pretraining_tp": [1], "sliding_window": [], "partial_rotary_factor": [1.0],
        "rope_type": ["default", "llama3"], "type": ["default", "llama3"], "layer_types": [["full_attention"]],
        **dict.fromkeys(("is_llama_config", "max_window_layers", *LLAMA3)),
    },
    unseen=(
        "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rms_norm_eps",
        "hidden_act",
    ),
    complete=_complete,
)  # fmt: skip


def chosen_size(size: str | None, given: Mapping[str, Any]) -> Size:
    """Return one of ``SIZES``, with each given number that is not None. If ``size`` is None, all numbers must be given.

    Raises:
        ModelError: If the size is unknown, or a number is missing.
    """
    if size is not None:
        return with_sizes(size, given, SIZES)
    numbers = {key: value for key, value in given.items() if value is not None}
    if lacks := [field.name for field in fields(Size) if field.default is MISSING and field.name not in numbers]:
        raise ModelError(
            f"model.size is not set, nor is model.{', model.'.join(lacks)}; set model.size=, or model.init_from= a "
            "folder with config.json"
        )
    return Size(**numbers)


def sizes_of(model: Mapping[str, Any], words: int | None = None) -> dict[str, Any]:
    """Return the values for the nulls in a section ``model``, for data with this number of ``words``.

    If there is a config.json beside the weights ``init_from``, return its sizes. Otherwise return only the vocabulary:
    that of ``size``, or that of the data if it is larger.

    Raises:
        ModelError: If config.json describes another kind of model.
    """
    known, size = {field.name: model.get(field.name) for field in fields(Size)}, model["size"]
    if (sizes := LLAMA.beside(model)) is None:
        vocabulary = chosen_size(size, known).vocab_size
        return {"vocab_size": vocabulary if known["vocab_size"] else max(vocabulary, words or 0)}
    return sizes | {key: value for key, value in known.items() if value is not None}


def to_config(size: Size) -> dict[str, Any] | None:
    """Return transformers' config.json for these sizes; None if no published architecture has these sizes."""
    kind = next((kind for kind, extras in LLAMA.kinds.items() if extras.items() <= vars(size).items()), None)
    if kind is None:
        return None
    scaling = {"rope_type": "default"} if size.rope_scaling is None else {"rope_type": "llama3", **size.rope_scaling}
    return {
        "architectures": [kind],
        "model_type": kind.removesuffix("ForCausalLM").lower(),
        **{theirs: getattr(size, key) for key, theirs in KEYS.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        # transformers 5 reads the first key, transformers 4 the second.
        "rope_parameters": {"rope_theta": size.rope_theta, **scaling},
        "rope_scaling": None if size.rope_scaling is None else scaling,
    }
