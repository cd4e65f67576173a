"""The sizes of the Llama family, as published, and what config.json says of one. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.files import expand_home, parse_json
from models.gpt2_sizes import with_sizes


@dataclass(frozen=True)
class Size:
    """The sizes of a model of the family.

    Attributes:
        n_embd: The width; independent of ``n_head`` times ``head_dim``.
        n_layer: Number of layers.
        n_head: Query heads.
        kv_heads: Heads of keys and values, each of which serves n_head / kv_heads query heads.
        head_dim: The width of a head, even.
        mlp_width: The width between the projections of an MLP.
        vocab_size: Words, padding included.
        block_size: The longest sequence, in tokens.
        rope_theta: The base of the rotations' wavelengths.
        rope_scaling: What Llama 3 stretches long wavelengths by: factor, low_freq_factor, high_freq_factor and
            original_max_position_embeddings. None: nothing.
        norm_eps: Added to the mean square in a norm.
        qkv_bias: Whether the projections to queries, keys and values have biases (Qwen2).
        qk_norm: Whether each head's queries and keys are normalised (Qwen3).
        tied: Whether the head is the embedding.
        init_std: Of the initial weights.
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
    "tiny": Size(128, 4, 4, 2, 32, 384, 50304, 1024),
    "135M": Size(576, 30, 9, 3, 64, 1536, 49152, 8192, 1e5, init_std=0.041666666666666664),
    "360M": Size(960, 32, 15, 5, 64, 2560, 49152, 8192, 1e5),
    "qwen2.5-0.5B": Size(896, 24, 14, 2, 64, 4864, 151936, 32768, 1e6, norm_eps=1e-6, qkv_bias=True),
    "qwen3-0.6B": Size(1024, 28, 16, 8, 128, 3072, 151936, 40960, 1e6, norm_eps=1e-6, qk_norm=True),
    "llama3.2-1B": Size(2048, 16, 32, 8, 64, 8192, 128256, 131072, 5e5, LLAMA3),
    "tinyllama-1.1B": Size(2048, 22, 32, 4, 64, 5632, 32000, 2048, tied=False),
}

KEYS = {  # this project's names, and those of Hugging Face's config.json
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "mlp_width": "intermediate_size",
    "vocab_size": "vocab_size", "block_size": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings", "init_std": "initializer_range",
}  # fmt: skip
KINDS = {
    "LlamaForCausalLM": {"qkv_bias": False, "qk_norm": False},
    "Qwen2ForCausalLM": {"qkv_bias": True, "qk_norm": False},
    "Qwen3ForCausalLM": {"qkv_bias": False, "qk_norm": True},
}
# What else config.json may hold, rotations and kinds of layers included: the values that this model computes with ...
_FIXED = {
    "hidden_act": ["silu"], "attention_dropout": [0.0], "mlp_bias": [False], "attention_bias": [False],
    "pretraining_tp": [1], "use_sliding_window": [False], "rope_interleaved": [False], "partial_rotary_factor": [1.0],
    "rope_type": ["default", "llama3"], "type": ["default", "llama3"], "layer_types": [[], ["full_attention"]],
}  # fmt: skip
# ... and what no logit depends on, or is read.
_FREE = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "_name_or_path", "is_llama_config", "transformers.js_config", "sliding_window",
    "max_window_layers", "rope_theta", "rope_scaling", "rope_parameters", *LLAMA3, *KEYS.values(),
}  # fmt: skip


def sizes_of(model: Mapping[str, Any], words: int | None = None) -> dict[str, Any]:
    """Return what the nulls of a section ``model`` stand for, for data of so many ``words``.

    Those are the sizes in the config.json of the folder ``init_from``, where there is one; else the vocabulary: that of
    ``size``, or of the data if it is larger.

    Raises:
        ModelError: config.json describes something else, or a size in the section is not the folder's.
    """
    path = None if model.get("init_from") is None else expand_home(model["init_from"]) / "config.json"
    known = {field.name: model.get(field.name) for field in fields(Size)}
    if path is None or not path.is_file() or None not in known.values():
        own = with_sizes(model["size"], known, SIZES).vocab_size
        return {"vocab_size": own if known["vocab_size"] else max(own, words or 0)}
    sizes = read_config(path)
    for key, value in sizes.items():
        own = known[key]
        if own not in (None, value) and not (key == "vocab_size" and own > value):
            raise ModelError(f"model.{key}={own}, and {path} says {KEYS.get(key, key)}={value}; leave model.{key} out")
    return sizes


def read_config(path: Path) -> dict[str, Any]:
    """Return the sizes that a config.json describes.

    Raises:
        ModelError: It is of another kind, or has a key that may change numbers and that this model does not know.
    """
    try:
        config = {key: value for key, value in parse_json(path.read_bytes()).items() if value is not None}
        kind, heads = config["architectures"][0], config["num_attention_heads"]
        extras = KINDS[kind]
        known = {"num_key_value_heads": heads, "tie_word_embeddings": False, "initializer_range": 0.02}
        known |= {"head_dim": 128 if extras["qk_norm"] else config["hidden_size"] // heads, **config}
        rope = {"rope_theta": 10_000.0, "layer_types": []} | config
        rope |= {**config.get("rope_scaling", {}), **config.get("rope_parameters", {})}
        rope["layer_types"] = sorted({*rope["layer_types"]})
        stretched = "llama3" in (rope.get("rope_type"), rope.get("type"))
        scaling = {key: rope[key] for key in LLAMA3} if stretched else None
        theta = float(rope["rope_theta"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is none of {', '.join(KINDS)}: {error!r}") from None
    problems = [f"lacks {theirs}" for theirs in KEYS.values() if theirs not in known]
    for key, value in rope.items():
        if key not in _FREE and value not in _FIXED.get(key, ()):
            problems.append(f"has {key}={value}, which is not known here")
    if problems:
        raise ModelError(f"{path} {', '.join(problems)}; model=llama would compute other numbers than {kind}")
    sizes = {key: known[theirs] for key, theirs in KEYS.items()}
    return {**sizes, **extras, "rope_theta": theta, "rope_scaling": scaling}


def to_config(size: Size) -> dict[str, Any] | None:
    """Return config.json of transformers for these sizes; None where no published kind is like that."""
    kind = next((kind for kind, extras in KINDS.items() if extras.items() <= vars(size).items()), None)
    if kind is None:
        return None
    scaling = {"rope_type": "default"} if size.rope_scaling is None else {"rope_type": "llama3", **size.rope_scaling}
    return {
        "architectures": [kind],
        "model_type": kind.removesuffix("ForCausalLM").lower(),
        **{theirs: getattr(size, key) for key, theirs in KEYS.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        # as transformers 5 reads it, and as 4 does
        "rope_parameters": {"rope_theta": size.rope_theta, **scaling},
        "rope_theta": size.rope_theta,
        "rope_scaling": None if size.rope_scaling is None else scaling,
    }
