"""The language model of PyTorch's "DDP and pipeline parallelism" tutorial.

Post-norm Transformer encoder layers (Vaswani et al. 2017), with sinusoidal positions and ReLU. The tutorial uses no
mask, so each word sees the next word, which it should predict, and the printed perplexity of 1.39 is the result of
copying. Here attention is causal. Source: "Training Transformer models using Distributed Data Parallel and Pipeline
Parallelism" (PyTorch tutorials up to 2.3).
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import CausalAttention, UsesCache
from models.chain import Chain, LayerSpec, check_sizes, check_width, reset_parameters
from models.cut import Columns, Rows, Vocabulary
from models.fused_cross_entropy import FusedHead
from models.losses import TokenCrossEntropy

INITIAL_RANGE = 0.1  # for the embedding and the projection onto the vocabulary, as published


class Positions(UsesCache, nn.Module):
    """Adds sin(p w_i) to the even and cos(p w_i) to the odd channels of position p, w_i = 10000^(-2i / d_model)."""

    pe: Tensor

    def __init__(self, max_len: int, d_model: int) -> None:
        super().__init__()
        # The buffer follows from the configuration, so checkpoints do not contain it.
        self.register_buffer("pe", torch.empty(max_len, d_model), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the buffer. Its memory may be uninitialized."""
        length, width = self.pe.shape
        frequencies = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width))
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        self.pe[:, 0::2] = angles.sin()
        self.pe[:, 1::2] = angles.cos()

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, d_model] -> same."""
        return x + self.position_rows(self.pe, x.shape[1])


class Encoder(nn.Module):
    """Token ids [b, t] -> embeddings times sqrt(d_model) plus positions [b, t, d_model], dropout applied."""

    def __init__(self, vocab_size: int, d_model: int, max_len: int, dropout: float) -> None:
        super().__init__()
        self.scale = math.sqrt(d_model)
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = Positions(max_len, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, t] -> [b, t, d_model]."""
        return self.dropout(self.positions(self.embedding(tokens) * self.scale))


class SelfAttention(CausalAttention):
    """Causal multi-head self-attention [b, t, d_model] -> same, with ``nn.MultiheadAttention``'s parameters."""

    def __init__(self, d_model: int, n_head: int, dropout: float) -> None:
        super().__init__(d_model // n_head, dropout)
        self.in_proj_weight = nn.Parameter(torch.empty(3 * d_model, d_model))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * d_model))
        self.out_proj = nn.Linear(d_model, d_model)

    def reset_parameters(self) -> None:
        """Draw weights as ``nn.MultiheadAttention`` does: query, key and value as one matrix."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.in_proj_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, d_model] -> same."""
        return self.out_proj(self.attend(F.linear(x, self.in_proj_weight, self.in_proj_bias)))


class TransformerLayer(nn.Module):
    """``nn.TransformerEncoderLayer(batch_first=True)`` under a causal mask: [b, t, d_model] -> same.

    The parameter names and numbers are the same. torch's own layer needs the mask as a tensor in each call.
    """

    def __init__(self, d_model: int, n_head: int, d_hid: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = SelfAttention(d_model, n_head, dropout)
        self.linear1 = nn.Linear(d_model, d_hid)
        self.linear2 = nn.Linear(d_hid, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, d_model] -> same."""
        x = self.norm1(x + self.dropout(self.self_attn(x)))
        return self.norm2(x + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(x))))))


class Decoder(FusedHead):
    """Projection onto the vocabulary, [b, t, d_model] -> logits [b, t, vocab_size]; not tied to the embedding."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.projection = nn.Linear(d_model, vocab_size)


def initialise(name: str, module: nn.Module) -> None:
    """Set a module's initial weights as ``nn.TransformerEncoderLayer`` does.

    Embedding and projection are uniform in +-0.1, and the projection's bias is 0, as published.
    """
    if isinstance(module, nn.Embedding) or name == "decoder.projection":
        module.get_parameter("weight").uniform_(-INITIAL_RANGE, INITIAL_RANGE)
    else:
        reset_parameters(name, module)
    if name == "decoder.projection" or name.endswith("out_proj"):
        module.get_parameter("bias").zero_()


def transformer(
    d_model: int = 192,
    d_hid: int = 384,
    n_head: int = 4,
    n_layer: int = 2,
    dropout: float = 0.2,
    max_len: int = 512,
    vocab_size: int | None = None,
) -> Chain:
    """Build the tutorial's model as a chain: ``encoder``, ``layers.0`` … ``layers.N-1``, ``decoder``.

    Token ids [b, t] -> logits [b, t, vocab_size]. ``d_hid`` is the width between the two linear maps of a layer.
    ``max_len`` is the length of the longest sequence. Raises ValueError for sizes that do not fit together.
    """
    if vocab_size is None:
        raise ValueError("model.vocab_size is not set and the data has no vocabulary to take it from; set it")
    sizes = {"d_model": d_model, "d_hid": d_hid, "n_head": n_head, "n_layer": n_layer}
    check_sizes(**sizes, max_len=max_len, vocab_size=vocab_size, dropout=dropout)
    check_width("d_model", d_model, n_head, even=True)  # positions are pairs of sine and cosine
    layer = partial(TransformerLayer, d_model, n_head, d_hid, dropout)
    return Chain(
        layers=[
            LayerSpec("encoder", partial(Encoder, vocab_size, d_model, max_len, dropout)),
            *(LayerSpec(f"layers.{i}", layer) for i in range(n_layer)),
            LayerSpec("decoder", partial(Decoder, vocab_size, d_model)),
        ],
        loss=TokenCrossEntropy(),
        initialise=initialise,
        limits={"positions": max_len, "vocabulary": vocab_size},
        embedding="encoder.embedding.weight",
        continues=True,
        cut={
            "encoder.embedding": Vocabulary(),
            "layers.*.self_attn": Columns(groups=3, unit=d_model // n_head),
            "layers.*.self_attn.out_proj": Rows(),
            "layers.*.linear1": Columns(),
            "layers.*.linear2": Rows(),
            "decoder.projection": Vocabulary(),
        },
    )
