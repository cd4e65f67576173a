"""GPT-2's parameters under Hugging Face's names, and back.

Hugging Face keeps the four projections of a block as ``Conv1D``, which is a Linear with its weight transposed, and
writes a vocabulary of 50,257 rows; ours may be padded to more.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
EMBEDDING = "embedding.wte.weight"
_RENAMED = {
    "embedding.wte.weight": "transformer.wte.weight",
    "embedding.wpe.weight": "transformer.wpe.weight",
    "head.ln_f.weight": "transformer.ln_f.weight",
    "head.ln_f.bias": "transformer.ln_f.bias",
}
_BACK = {theirs: ours for ours, theirs in _RENAMED.items()}
PREFIX = "transformer."  # which the published files lack


def their_name(name: str) -> str:
    """Hugging Face's name of our parameter ``name``."""
    return _RENAMED.get(name, f"{PREFIX}{name}")


def convert(name: str, tensor: Tensor) -> Tensor:
    """Our parameter ``name`` as Hugging Face keeps it; theirs as we keep it."""
    return tensor.t().contiguous() if name.endswith(_TRANSPOSED) else tensor


def pad(rows: Tensor, vocab_size: int) -> Tensor:
    """``rows`` [n, n_embd] of an embedding padded to [vocab_size, n_embd] with the mean row: a zero row would have
    logit 0, which is more than most words get. Raises ValueError where there are more than that."""
    if len(rows) > vocab_size:
        raise ValueError(f"the checkpoint has {len(rows)} words, model.vocab_size={vocab_size} is too few")
    return torch.cat([rows, rows.mean(dim=0, keepdim=True).expand(vocab_size - len(rows), -1)])


def to_huggingface(state: Mapping[str, Tensor], vocab_size: int = 50257) -> dict[str, Tensor]:
    """This project's GPT-2 state -> the state of ``transformers.GPT2LMHeadModel``.

    Rows of the embedding beyond ``vocab_size`` (padding) are left out. The tied head appears under both of Hugging
    Face's names, sharing memory.
    """
    converted = {}
    for name, tensor in state.items():
        if name == "head.lm_head.weight":
            continue
        converted[their_name(name)] = convert(name, tensor)
    converted["transformer.wte.weight"] = converted["transformer.wte.weight"][:vocab_size]
    converted["lm_head.weight"] = converted["transformer.wte.weight"]
    return converted


def from_huggingface(state: Mapping[str, Tensor], vocab_size: int = 50304) -> dict[str, Tensor]:
    """The state of a Hugging Face GPT-2 (with or without the ``transformer.`` prefix) -> this project's state.

    The embedding is padded to ``vocab_size`` rows. Raises ValueError where the checkpoint has more than that.
    """
    converted = {}
    for name, tensor in state.items():
        if name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # tied to the embedding; causal masks of old checkpoints
        full = name if name.startswith(PREFIX) else f"{PREFIX}{name}"
        ours = _BACK.get(full, full.removeprefix(PREFIX))
        converted[ours] = convert(ours, tensor)
    converted[EMBEDDING] = pad(converted[EMBEDDING], vocab_size)
    return converted
