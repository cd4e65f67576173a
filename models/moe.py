"""A small mixture-of-experts decoder: Llama's attention, and in each layer a router that sends each token to experts.

The parts follow Switch Transformers (Fedus et al. 2022: the load-balance loss), ST-MoE (Zoph et al. 2022: the z-loss)
and DeepSeek-V3 (2024: shared experts, sigmoid scores, a bias that balances without a loss). No token is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ModelError
from models.auxiliary import attach
from models.chain import Chain, LayerSpec, check_sizes, draw_normal
from models.cut import Columns, CutOf, Rows, Vocabulary
from models.cut import Experts as DividedExperts
from models.fused_cross_entropy import Head
from models.grouped import by_expert, product
from models.llama import MLP, Attention, Norm
from models.llama_sizes import Size
from models.losses import TokenCrossEntropy

_EMBEDDING = "embedding.embed_tokens.weight"


@dataclass(frozen=True)
class Routing:
    """How tokens are sent to experts. The attributes are the arguments of ``moe``."""

    experts: int
    top_k: int
    scores: str
    renormalize: bool
    balance: float
    z_loss: float
    bias_rate: float


class Router(nn.Module):
    """Chooses ``top_k`` experts for each token.

    It computes in the dtype of its weights, also under autocast, because rounded scores choose other experts.

    Attributes:
        bias: [experts], added to the scores for the choice only. It exists if ``bias_rate`` is above 0.
    """

    full_name = ""
    bias: Tensor

    def __init__(self, size: Size, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, size.n_embd))
        if routing.bias_rate > 0:
            self.register_buffer("bias", torch.empty(routing.experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as ``nn.Linear`` does, and set the bias to zero."""
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        if self.routing.bias_rate > 0:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for tokens [n, n_embd]. Return their indices and weights, [n, top_k] each."""
        how = self.routing
        kind = x.device.type
        with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            logits = F.linear(x.to(self.weight.dtype), self.weight)
        scores = logits.softmax(dim=-1) if how.scores == "softmax" else logits.sigmoid()
        ranked = scores.detach() + self.bias if how.bias_rate > 0 else scores
        chosen = ranked.topk(how.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if how.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.training and (how.balance or how.z_loss or how.bias_rate):
            weights = self._balanced(weights, chosen, scores, logits)
        return chosen, weights.to(x.dtype)

    def _balanced(self, weights: Tensor, chosen: Tensor, scores: Tensor, logits: Tensor) -> Tensor:
        """Attach the auxiliary losses of tokens: [n, top_k] weights and choices, [n, experts] scores and logits."""
        how = self.routing
        choices = scores.new_zeros(how.experts).index_add_(0, chosen.flatten(), scores.new_ones(chosen.numel()))
        shares = scores if how.scores == "softmax" else scores / scores.sum(dim=-1, keepdim=True)
        sums = [
            choices,
            shares.sum(dim=0),
            logits.logsumexp(dim=-1).square().sum()[None],
            scores.new_full((1,), len(scores)),
        ]
        return attach(
            weights,
            self.full_name,
            torch.cat(sums),
            loss=self._added if how.balance or how.z_loss else None,
            after_step=self._move_bias if how.bias_rate else None,
        )

    def _added(self, totals: Tensor) -> Tensor:
        n = self.routing.experts
        choices, shares, z, tokens = totals.split((n, n, 1, 1))
        balance = n * (choices / tokens * (shares / tokens)).sum()
        return self.routing.balance * balance + self.routing.z_loss * (z / tokens).sum()

    def _move_bias(self, totals: Tensor) -> None:
        choices = totals[: self.routing.experts]
        self.bias += self.routing.bias_rate * (choices.mean() - choices).sign().to(self.bias)


class Experts(nn.Module):
    """Gated MLPs of one width, whose matrices are stacked in the layout of transformers' mixtures."""

    def __init__(self, experts: int, n_embd: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, n_embd))
        self.down_proj = nn.Parameter(torch.empty(experts, n_embd, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's matrices as ``nn.Linear`` does."""
        for matrix in (*self.gate_up_proj, *self.down_proj):
            nn.init.kaiming_uniform_(matrix, a=5**0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute tokens [n, n_embd] -> same by the experts ``chosen`` [n, k], with ``weights`` [n, k]."""
        return by_expert(x, chosen, weights, len(self.gate_up_proj), self._computed)

    def _computed(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = product(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
        return product(F.silu(gate) * up, self.down_proj.transpose(1, 2), ends)


class Mixture(nn.Module):
    """[b, t, n_embd] -> same: the weighted sum of each token's experts, and the shared experts of all tokens."""

    def __init__(self, size: Size, routing: Routing, shared_experts: int) -> None:
        super().__init__()
        self.gate = Router(size, routing)
        self.experts = Experts(routing.experts, size.n_embd, size.mlp_width)
        if shared_experts:
            self.shared_experts = MLP(replace(size, mlp_width=shared_experts * size.mlp_width))

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, n_embd] -> same."""
        tokens = x.flatten(0, 1)
        y = self.experts(tokens, *self.gate(tokens)).view_as(x)
        return y + self.shared_experts(x) if hasattr(self, "shared_experts") else y


class Block(nn.Module):
    """One layer of the decoder, [b, t, n_embd] -> same."""

    def __init__(self, size: Size, routing: Routing, shared_experts: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(size.n_embd, eps=size.norm_eps), Attention(size)
        self.post_attention_layernorm = Norm(size.n_embd, eps=size.norm_eps)
        self.mlp = Mixture(size, routing, shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, n_embd] -> same."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def moe(
    n_layer: int = 4,
    n_head: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    n_embd: int = 128,
    experts: int = 8,
    top_k: int = 2,
    expert_width: int = 128,
    shared_experts: int = 0,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = True,
    balance: float = 0.01,
    z_loss: float = 0.001,
    bias_rate: float = 0.0,
    block_size: int = 1024,
    vocab_size: int = 50304,
    rope_theta: float = 10_000.0,
    norm_eps: float = 1e-5,
    tied: bool = True,
    init_std: float = 0.02,
) -> Chain:
    """Build a mixture of experts as a chain: ``embedding``, ``layers.0`` … ``layers.N-1``, ``head``.

    Token ids [b, t] -> logits [b, t, vocab_size].

    Args:
        n_layer: The number of layers.
        n_head: The number of query heads.
        kv_heads: The number of heads of keys and values.
        head_dim: The width of a head, even.
        n_embd: The width.
        experts: The number of experts in each layer.
        top_k: The number of experts that compute each token.
        expert_width: The width between the projections of an expert.
        shared_experts: The number of experts that compute all tokens.
        scores: How logits become scores: "softmax" over the experts, or "sigmoid" of each.
        renormalize: Whether the weights of a token's experts are its scores divided by their sum.
        balance: The factor of the load-balance loss of each layer, ``experts * sum_e f_e P_e`` over the global batch.
            f_e is the number of tokens that chose expert e, divided by the number of tokens; P_e is the mean of its
            scores, which add up to 1 for each token. All positions count, padding included.
        z_loss: The factor of the z-loss of each layer, the mean of logsumexp(logits)^2 over the global batch.
        bias_rate: The amount by which the bias of an expert grows after a step, if fewer tokens than the mean chose the
            expert, or else shrinks. 0 for no bias.
        block_size: The length of the longest sequence, in tokens.
        vocab_size: The number of words.
        rope_theta: The base of the rotations' wavelengths.
        norm_eps: The number added to the mean square in a norm.
        tied: Whether the head and the embedding are one parameter.
        init_std: The standard deviation of the initial weights.

    Raises:
        ModelError, ValueError: If sizes do not fit together.
    """
    size = Size(
        n_embd, n_layer, n_head, kv_heads, head_dim, expert_width, vocab_size, block_size, rope_theta,
        norm_eps=norm_eps, tied=tied, init_std=init_std,
    )  # fmt: skip
    check_sizes(
        n_layer=n_layer, n_head=n_head, kv_heads=kv_heads, head_dim=head_dim, n_embd=n_embd, experts=experts,
        top_k=top_k, expert_width=expert_width, block_size=block_size, vocab_size=vocab_size,
    )  # fmt: skip
    if n_head % kv_heads:
        raise ModelError(f"model.kv_heads={kv_heads} does not divide model.n_head={n_head}; set another")
    if head_dim % 2:
        raise ModelError(f"model.head_dim={head_dim} must be even, because positions rotate pairs")
    if top_k > experts:
        raise ModelError(f"model.top_k={top_k} experts compute each token, and there are model.experts={experts}")
    if scores not in ("softmax", "sigmoid"):
        raise ModelError(f"model.scores={scores} must be softmax or sigmoid")
    if wrong := [f"{k}={v}" for k, v in dict(shared_experts=shared_experts, balance=balance, z_loss=z_loss,
                                             bias_rate=bias_rate).items() if v < 0]:  # fmt: skip
        raise ModelError(f"model.{wrong[0]} must be at least 0")
    routing = Routing(experts, top_k, scores, renormalize, balance, z_loss, bias_rate)
    block, norm = partial(Block, size, routing, shared_experts), partial(Norm, eps=norm_eps)
    shared: dict[str, CutOf] = {
        "layers.*.mlp.shared_experts.gate_proj": Columns(),
        "layers.*.mlp.shared_experts.up_proj": Columns(),
        "layers.*.mlp.shared_experts.down_proj": Rows(),
    }
    return Chain(
        layers=[
            LayerSpec("embedding", partial(_embedding, size)),
            *(LayerSpec(f"layers.{i}", block) for i in range(n_layer)),
            LayerSpec("head", partial(Head, "norm", norm, n_embd, vocab_size)),
        ],
        loss=TokenCrossEntropy(),
        tied={"head.lm_head.weight": _EMBEDDING} if tied else {},
        initialise=partial(_initialise, init_std),
        limits={"positions": block_size, "vocabulary": vocab_size},
        embedding=_EMBEDDING,
        continues=True,
        cut={
            "embedding.embed_tokens": Vocabulary(),
            "layers.*.self_attn.q_proj": Columns(unit=head_dim),
            "layers.*.self_attn.[kv]_proj": Columns(unit=head_dim, shared=True),
            "layers.*.self_attn.o_proj": Rows(),
            "layers.*.mlp.experts": DividedExperts(),
            **(shared if shared_experts else {}),
            "head.lm_head": Vocabulary(),
        },
    )


def _embedding(size: Size) -> nn.Module:
    """Token ids [b, t] -> [b, t, n_embd]."""
    return nn.Sequential(OrderedDict(embed_tokens=nn.Embedding(size.vocab_size, size.n_embd)))


def _initialise(std: float, name: str, module: nn.Module) -> None:
    if isinstance(module, Experts):
        for parameter in module.parameters():
            parameter.normal_(0.0, std)
        return
    draw_normal(name, module, std=std)
