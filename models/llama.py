"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU, usually a tied head.

The module covers Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024), SmolLM2, Qwen2.5 (biases on queries,
keys and values) and Qwen3 (normalized queries and keys). Names, sizes and numbers equal those of transformers'
``LlamaForCausalLM``, ``Qwen2ForCausalLM`` and ``Qwen3ForCausalLM``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ModelError
from models.attention import UsesCache, attend
from models.chain import Chain, LayerSpec, check_sizes, draw_normal
from models.cut import Columns, Rows, Vocabulary
from models.fused_cross_entropy import Head
from models.huggingface import HuggingFace
from models.llama_sizes import LLAMA, LLAMA3, Size, chosen_size, sizes_of, to_config
from models.losses import TokenCrossEntropy

SizeName = Literal["tiny", "135M", "360M", "qwen2.5-0.5B", "qwen3-0.6B", "llama3.2-1B", "tinyllama-1.1B"]
_EMBEDDING = "embedding.embed_tokens.weight"
_NAMES = {"embedding.": "model.", "layers.": "model.layers.", "head.norm.": "model.norm.", "head.": ""}


class Norm(nn.RMSNorm):
    """torch's RMSNorm in the dtype of its weights. Under autocast torch would round the input, but not the weights."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., n] -> same."""
        kind = x.device.type
        with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            return super().forward(x.to(self.weight.dtype))


def frequencies(size: Size, device: torch.device) -> Tensor:
    """Return the angle by which each pair of a head turns from one position to the next, [head_dim / 2] float32.

    Llama 3 divides the angles of long wavelengths by a factor, and the angles of medium wavelengths by less.
    """
    steps = torch.arange(0, size.head_dim, 2, dtype=torch.float32, device=device)
    turns = 1.0 / (size.rope_theta ** (steps / size.head_dim))
    if size.rope_scaling is None:
        return turns
    factor, low, high, original = (size.rope_scaling[key] for key in LLAMA3)
    lengths = 2 * math.pi / turns
    share = ((original / lengths - low) / (high - low)).clamp(0.0, 1.0)  # of the original angle: 0 long, 1 short
    return (1 - share) * turns / factor + share * turns


class Attention(UsesCache, nn.Module):
    """Causal self-attention [b, t, n_embd] -> same. Several query heads use each head of keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        inner, kept = size.n_head * size.head_dim, size.kv_heads * size.head_dim
        self.q_proj = nn.Linear(size.n_embd, inner, bias=size.qkv_bias)
        self.k_proj = nn.Linear(size.n_embd, kept, bias=size.qkv_bias)
        self.v_proj = nn.Linear(size.n_embd, kept, bias=size.qkv_bias)
        self.o_proj = nn.Linear(inner, size.n_embd, bias=False)
        if size.qk_norm:
            self.q_norm, self.k_norm = (Norm(size.head_dim, eps=size.norm_eps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, n_embd] -> same."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.size.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.size.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        # Each layer computes the angles, so that only hidden states pass from layer to layer and from stage to stage.
        angles = self.positions(q.shape[1], x.device)[..., None, None] * frequencies(self.size, x.device)
        cos, sin = angles.cos(), angles.sin()  # [t, 1, head_dim / 2], or [b, 1, 1, head_dim / 2]
        q, k, v = (heads.transpose(1, 2) for heads in (_rotated(q, cos, sin), _rotated(k, cos, sin), v))
        if self.cache is not None:
            y = self.cache.attend(self, q, k, v)
        else:
            y = attend(q, k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of heads [b, t, heads, head_dim], in float32 or wider; return x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class MLP(nn.Module):
    """[b, t, n_embd] -> same, gated (SwiGLU: Shazeer 2020)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.n_embd, size.mlp_width, bias=False)
        self.up_proj = nn.Linear(size.n_embd, size.mlp_width, bias=False)
        self.down_proj = nn.Linear(size.mlp_width, size.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, n_embd] -> same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer of the decoder, [b, t, n_embd] -> same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(size.n_embd, eps=size.norm_eps), Attention(size)
        self.post_attention_layernorm, self.mlp = Norm(size.n_embd, eps=size.norm_eps), MLP(size)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, n_embd] -> same."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def llama(
    size: SizeName | None = "tiny",
    n_layer: int | None = None,
    n_head: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    n_embd: int | None = None,
    mlp_width: int | None = None,
    block_size: int | None = None,
    vocab_size: int | None = None,
    rope_theta: float | None = None,
    rope_scaling: dict[str, Any] | None = None,
    norm_eps: float | None = None,
    qkv_bias: bool | None = None,
    qk_norm: bool | None = None,
    tied: bool | None = None,
    init_std: float | None = None,
) -> Chain:
    """Build a model of the family as a chain: ``embedding``, ``layers.0`` … ``layers.N-1``, ``head``.

    Token ids [b, t] -> logits [b, t, vocab_size]. Each given number after ``size`` replaces the number of the size. If
    ``size`` is None, all numbers must be given. ``models.llama_sizes.Size`` describes them. Raises ValueError for sizes
    that do not fit together.
    """
    given = {key: value for key, value in locals().items() if key != "size"}
    chosen = chosen_size(size, given)
    check_sizes(**{key: value for key, value in vars(chosen).items() if type(value) is int})
    if chosen.n_head % chosen.kv_heads:
        raise ModelError(f"model.kv_heads={chosen.kv_heads} does not divide model.n_head={chosen.n_head}; set another")
    if chosen.head_dim % 2:
        raise ModelError(f"model.head_dim={chosen.head_dim} must be even, because positions rotate pairs")
    if chosen.rope_scaling is not None and set(chosen.rope_scaling) != set(LLAMA3):
        raise ModelError(f"model.rope_scaling={dict(chosen.rope_scaling)} must have {', '.join(LLAMA3)}, or be null")
    block, config = partial(Block, chosen), to_config(chosen)
    norm = partial(Norm, eps=chosen.norm_eps)
    return Chain(
        layers=[
            LayerSpec("embedding", partial(_embedding, chosen)),
            *(LayerSpec(f"layers.{i}", block) for i in range(chosen.n_layer)),
            LayerSpec("head", partial(Head, "norm", norm, chosen.n_embd, chosen.vocab_size)),
        ],
        loss=TokenCrossEntropy(),
        tied={"head.lm_head.weight": _EMBEDDING} if chosen.tied else {},
        initialise=partial(draw_normal, std=chosen.init_std),
        limits={"positions": chosen.block_size, "vocabulary": chosen.vocab_size},
        embedding=_EMBEDDING,
        continues=True,
        hugging_face=None if config is None else _hugging_face(chosen, config),
        cut={
            "embedding.embed_tokens": Vocabulary(),
            "layers.*.self_attn.q_proj": Columns(unit=chosen.head_dim),
            "layers.*.self_attn.[kv]_proj": Columns(unit=chosen.head_dim, shared=True),
            "layers.*.self_attn.o_proj": Rows(),
            "layers.*.mlp.gate_proj": Columns(),
            "layers.*.mlp.up_proj": Columns(),
            "layers.*.mlp.down_proj": Rows(),
            "head.lm_head": Vocabulary(),
        },
    )


def _embedding(size: Size) -> nn.Module:
    """Token ids [b, t] -> [b, t, n_embd]."""
    return nn.Sequential(OrderedDict(embed_tokens=nn.Embedding(size.vocab_size, size.n_embd)))


def _hugging_face(size: Size, config: dict[str, Any]) -> HuggingFace:
    """Return the file format of transformers. Older files also contain the rotations, possibly rounded to 16 bits."""
    return HuggingFace(
        LLAMA,
        config,
        _NAMES,
        words=(_EMBEDDING, "head.lm_head.weight"),
        redundant={".rotary_emb.inv_freq": partial(_are_frequencies, size)},
    )


def _are_frequencies(size: Size, given: Tensor) -> bool:
    wanted = frequencies(size, given.device)
    return given.shape == wanted.shape and torch.allclose(given.float(), wanted, rtol=1e-2, atol=1e-7)


llama.sizes_of = sizes_of  # the values of sizes that are null: see training.run.prepare.model_and_data
