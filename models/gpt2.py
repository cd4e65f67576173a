"""GPT-2: pre-norm Transformer decoder with learned positions, tanh GELU, biases and a tied head.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; sizes and initialization follow the
released code. ``models.huggingface`` maps names and shapes to and from Hugging Face's checkpoints.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import CausalAttention, UsesCache
from models.chain import Chain, LayerSpec, check_sizes, check_width, draw_normal
from models.cut import Columns, Rows, Vocabulary
from models.fused_cross_entropy import Head
from models.gpt2_sizes import DEFAULT, GPT2, Size, sizes_of, with_defaults
from models.huggingface import HuggingFace
from models.losses import TokenCrossEntropy

EMBEDDING = "embedding.wte.weight"


class Embedding(UsesCache, nn.Module):
    """Token ids [b, t] -> token plus position embeddings [b, t, n_embd], dropout applied."""

    def __init__(self, size: Size, vocab_size: int, dropout: float) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, size.n_embd)
        self.wpe = nn.Embedding(size.block_size, size.n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, t] -> [b, t, n_embd]."""
        return self.dropout(self.wte(tokens) + self.position_rows(self.wpe.weight, tokens.shape[1]))


class Attention(CausalAttention):
    """Causal multi-head self-attention [b, t, n_embd] -> same."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__(size.n_embd // size.n_head, dropout)
        self.c_attn = nn.Linear(size.n_embd, 3 * size.n_embd)
        self.c_proj = nn.Linear(size.n_embd, size.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, n_embd] -> same."""
        return self.c_proj(self.attend(self.c_attn(x)))


class MLP(nn.Module):
    """[b, t, n_embd] -> four times as wide -> [b, t, n_embd]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.c_fc = nn.Linear(size.n_embd, 4 * size.n_embd)
        self.c_proj = nn.Linear(4 * size.n_embd, size.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, n_embd] -> same."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """One layer of the decoder, [b, t, n_embd] -> same."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(size.n_embd), Attention(size, dropout)
        self.ln_2, self.mlp = nn.LayerNorm(size.n_embd), MLP(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, n_embd] -> same."""
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


def initialise(name: str, module: nn.Module, *, n_layer: int) -> None:
    """Set a module's initial weights: Normal(0, 0.02), Normal(0, 0.01) for positions as in OpenAI's code, zero biases.

    The two projections onto the residual stream are scaled by 1/sqrt(2 n_layer), so that the stream's variance does not
    grow with depth.
    """
    std = 0.01 if name.endswith("wpe") else 0.02
    draw_normal(name, module, std=std / math.sqrt(2 * n_layer) if name.endswith("c_proj") else std)


def gpt2(
    size: Literal["124M", "350M", "774M", "1558M", "tiny"] | None = DEFAULT,
    n_layer: int | None = None,
    n_head: int | None = None,
    n_embd: int | None = None,
    block_size: int | None = None,
    vocab_size: int | None = None,
    dropout: float = 0.0,
) -> Chain:
    """Build GPT-2 as a chain: ``embedding``, ``h.0`` … ``h.N-1``, ``head`` (final norm and tied projection).

    Token ids [b, t] -> logits [b, t, vocab_size]. Each given value of the four numbers after ``size`` replaces the
    value of the size. If ``size`` is None, it is 124M. GPT-2's vocabulary has 50257 words. The default 50304 = 393 x
    128 is faster on every device, and the model learns that the further words are rare. Raises ValueError for sizes
    that do not fit together.
    """
    chosen = with_defaults(locals())
    check_sizes(**vars(chosen), dropout=dropout)
    check_width("n_embd", chosen.n_embd, chosen.n_head)
    block = partial(Block, chosen, dropout)
    return Chain(
        layers=[
            LayerSpec("embedding", partial(Embedding, chosen, chosen.vocab_size, dropout)),
            *(LayerSpec(f"h.{i}", block) for i in range(chosen.n_layer)),
            LayerSpec("head", partial(Head, "ln_f", nn.LayerNorm, chosen.n_embd, chosen.vocab_size)),
        ],
        loss=TokenCrossEntropy(),
        tied={"head.lm_head.weight": EMBEDDING},
        initialise=partial(initialise, n_layer=chosen.n_layer),
        limits={"positions": chosen.block_size, "vocabulary": chosen.vocab_size},
        embedding=EMBEDDING,
        continues=True,
        hugging_face=_hugging_face(chosen, dropout),
        cut={
            "embedding.wte": Vocabulary(),
            "h.*.attn.c_attn": Columns(groups=3, unit=chosen.n_embd // chosen.n_head),
            "h.*.attn.c_proj": Rows(),
            "h.*.mlp.c_fc": Columns(),
            "h.*.mlp.c_proj": Rows(),
            "head.lm_head": Vocabulary(),
        },
    )


def _hugging_face(size: Size, dropout: float) -> HuggingFace:
    """Return the file format of ``GPT2LMHeadModel``. Its projections are ``Conv1D``, a Linear stored transposed."""
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(size, key) for key, theirs in GPT2.sizes.items()},
        "n_ctx": size.block_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    }
    return HuggingFace(
        GPT2,
        config,
        names={"embedding.": "transformer.", "h.": "transformer.h.", "head.ln_f.": "transformer.ln_f.", "head.": ""},
        words=(EMBEDDING,),
        transposed=("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"),
        redundant={".attn.bias": _is_causal, ".attn.masked_bias": _is_low},
        optional="transformer.",
    )


def _is_causal(mask: Tensor) -> bool:
    length = mask.shape[-1] if mask.ndim else 0
    wanted = torch.ones(length, length, dtype=torch.bool).tril()
    return mask.numel() == length**2 and torch.equal(mask.reshape(length, length).bool(), wanted)


def _is_low(masked: Tensor) -> bool:
    return bool((masked < -1e3).all())  # its share in a softmax is 0


gpt2.sizes_of = sizes_of  # the values of sizes that are null: see training.run.prepare.model_and_data
