"""GPT-2's parameters under Hugging Face's names, and back.

Hugging Face keeps the four projections of a block as ``Conv1D``, which is a Linear with its weight transposed, and
writes a vocabulary of 50,257 rows; the model's may be padded to more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PREFIX = "transformer."  # which the published files lack
EMBEDDING = "embedding.wte.weight"
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_RENAMED = {
    "embedding.wte.weight": "transformer.wte.weight",
    "embedding.wpe.weight": "transformer.wpe.weight",
    "head.ln_f.weight": "transformer.ln_f.weight",
    "head.ln_f.bias": "transformer.ln_f.bias",
}
_END_OF_TEXT = 50256
_HEAD = "lm_head.weight"  # tied: transformers takes it from the embedding


@dataclass(frozen=True)
class HuggingFaceGPT2:
    """How transformers' ``GPT2LMHeadModel`` keeps a GPT-2; ``config``: what of config.json follows from its sizes."""

    config: Mapping[str, Any]

    def export(self, state: Mapping[str, Tensor], vocab_size: int | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return Hugging Face's state dict, without the tied head, and the content of config.json.

        Rows of the embedding from ``vocab_size`` on are padding and left out; None: all rows are kept.
        """
        rows = len(state[EMBEDDING])
        words = rows if vocab_size is None else min(rows, vocab_size)
        converted = {self.their_name(n): self.convert(n, t) for n, t in state.items() if n != "head.lm_head.weight"}
        converted["transformer.wte.weight"] = converted["transformer.wte.weight"][:words]
        end = min(_END_OF_TEXT, words - 1)
        config = {
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": words,
            **self.config,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "bos_token_id": end,
            "eos_token_id": end,
            "tie_word_embeddings": True,
            "dtype": str(converted["transformer.wte.weight"].dtype).removeprefix("torch."),
        }
        return converted, config

    @staticmethod
    def their_name(name: str) -> str:
        """Return Hugging Face's name of the parameter ``name``."""
        return _RENAMED.get(name, f"{PREFIX}{name}")

    @staticmethod
    def convert(name: str, tensor: Tensor) -> Tensor:
        """Return the parameter ``name`` as Hugging Face keeps it, or theirs as this project keeps it."""
        return tensor.t().contiguous() if name.endswith(_TRANSPOSED) else tensor

    @staticmethod
    def is_redundant(their_name: str) -> bool:
        """Return whether a tensor repeats what is elsewhere: the tied head, or an old checkpoint's causal mask."""
        return their_name == _HEAD or their_name.endswith((".attn.bias", ".attn.masked_bias"))


def pad(rows: Tensor, vocab_size: int) -> Tensor:
    """Pad an embedding [n, n_embd] to [vocab_size, n_embd]; raise ValueError where it has more rows.

    The new rows are the mean row: a zero row would have logit 0, which is more than most words get.
    """
    if len(rows) > vocab_size:
        raise ValueError(f"the checkpoint has {len(rows)} words, model.vocab_size={vocab_size} is too few")
    return torch.cat([rows, rows.mean(dim=0, keepdim=True).expand(vocab_size - len(rows), -1)])
