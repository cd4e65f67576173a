"""A small mixture-of-experts decoder: Llama, with a router in each layer that sends each token to some experts.

The parts follow Switch Transformers (Fedus et al. 2022: the load-balance loss), ST-MoE (Zoph et al. 2022: the z-loss)
and DeepSeek-V3 (2024: shared experts, sigmoid scores, a bias that balances without a loss). No token is dropped.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ModelError
from models import llama
from models.auxiliary import attach
from models.chain import Chain, check_sizes, draw_normal
from models.cut import Columns, CutOf, Rows
from models.cut import Experts as DividedExperts
from models.grouped import by_expert, product
from models.llama_sizes import Size


@dataclass(frozen=True)
class Routing:
    """How tokens are sent to experts. The attributes are arguments of ``moe``."""

    experts: int
    top_k: int
    shared_experts: int
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
        self.routing, self.weight = routing, nn.Parameter(torch.empty(routing.experts, size.n_embd))
        if routing.bias_rate:
            self.register_buffer("bias", torch.empty(routing.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for tokens [n, n_embd]. Return their indices and weights, [n, top_k] each."""
        how, kind = self.routing, x.device.type
        with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            logits = F.linear(x.to(self.weight.dtype), self.weight)
        scores = logits.softmax(dim=-1) if how.scores == "softmax" else logits.sigmoid()
        chosen = (scores + self.bias if how.bias_rate else scores).topk(how.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if how.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.training and (how.balance or how.z_loss or how.bias_rate):
            weights = self._balanced(weights, chosen, scores, logits)
        return chosen, weights.to(x.dtype)

    def _balanced(self, weights: Tensor, chosen: Tensor, scores: Tensor, logits: Tensor) -> Tensor:
        """Attach the auxiliary losses of tokens: [n, top_k] weights and choices, [n, experts] scores and logits."""
        how, ones = self.routing, scores.new_ones(chosen.numel())
        choices = scores.new_zeros(how.experts).index_add_(0, chosen.flatten(), ones)
        shares = (scores / scores.sum(dim=-1, keepdim=True)).sum(dim=0)
        others = torch.stack((logits.logsumexp(dim=-1).square().sum(), scores.new_full((), len(scores))))
        loss = self._added if how.balance or how.z_loss else None
        after_step = self._move_bias if how.bias_rate else None
        return attach(weights, self.full_name, torch.cat((choices, shares, others)), loss, after_step)

    def _added(self, totals: Tensor) -> Tensor:
        how, (*of_experts, z, tokens) = self.routing, totals
        choices, shares = torch.stack(of_experts).view(2, -1)
        balance = how.experts * (choices / tokens * (shares / tokens)).sum()
        return how.balance * balance + how.z_loss * z / tokens

    def _move_bias(self, totals: Tensor) -> None:
        choices = totals[: self.routing.experts]
        self.bias += self.routing.bias_rate * (choices.mean() - choices).sign().to(self.bias)


class Experts(nn.Module):
    """Gated MLPs of one width, whose matrices are stacked in the layout of transformers' mixtures."""

    def __init__(self, experts: int, n_embd: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, n_embd))
        self.down_proj = nn.Parameter(torch.empty(experts, n_embd, width))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute tokens [n, n_embd] -> same by the experts ``chosen`` [n, k], with ``weights`` [n, k]."""
        return by_expert(x, chosen, weights, len(self.gate_up_proj), self._computed)

    def _computed(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = product(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
        return product(F.silu(gate) * up, self.down_proj.transpose(1, 2), ends)


class Mixture(nn.Module):
    """[b, t, n_embd] -> same: the weighted sum of each token's experts, and the shared experts of all tokens."""

    def __init__(self, size: Size, routing: Routing) -> None:
        super().__init__()
        self.gate, self.shared_experts = Router(size, routing), None
        self.experts = Experts(routing.experts, size.n_embd, size.mlp_width)
        if shared := routing.shared_experts:
            self.shared_experts = llama.MLP(replace(size, mlp_width=shared * size.mlp_width))

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, n_embd] -> same."""
        tokens = x.flatten(0, 1)
        y = self.experts(tokens, *self.gate(tokens)).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)


class Block(llama.Block):
    """One layer of the decoder, [b, t, n_embd] -> same."""

    def __init__(self, size: Size, routing: Routing) -> None:
        super().__init__(size)
        self.mlp = Mixture(size, routing)


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
    vocab_size: int | None = None,
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
        vocab_size: The number of words; None for 50,304.
        tied: Whether the head and the embedding are one parameter.
        init_std: The standard deviation of the initial weights.

    Raises:
        ModelError, ValueError: If sizes do not fit together.
    """
    if top_k > experts:
        raise ModelError(f"model.top_k={top_k} experts compute each token, and there are model.experts={experts}")
    routing = Routing(experts, top_k, shared_experts, scores, renormalize, balance, z_loss, bias_rate)
    if wrong := [f"{key}={value}" for key, value in vars(routing).items() if key != "scores" and value < 0]:
        raise ModelError(f"model.{wrong[0]} must be at least 0")
    check_sizes(experts=experts, top_k=top_k, expert_width=expert_width)
    words = vocab_size or 50304
    size = Size(n_embd, n_layer, n_head, kv_heads, head_dim, expert_width, words, block_size, tied=tied)
    dense = llama.llama(None, **{key: value for key, value in vars(size).items() if key != "rope_scaling"})
    block, mlp = partial(Block, size, routing), "layers.*.mlp"
    cut: dict[str, CutOf] = {name: how for name, how in dense.cut.items() if not name.startswith(mlp)}
    if shared_experts:
        cut |= {f"{mlp}.shared_experts.{name}_proj": Columns() for name in ("gate", "up")}
        cut[f"{mlp}.shared_experts.down_proj"] = Rows()
    return replace(
        dense,
        layers=[replace(layer, build=block) if "." in layer.name else layer for layer in dense.layers],
        initialise=partial(_initialise, init_std),
        hugging_face=None,
        cut=cut | {f"{mlp}.experts": DividedExperts()},
    )


def _initialise(std: float, name: str, module: nn.Module) -> None:
    if isinstance(module, Experts):
        for parameter in module.parameters():
            parameter.normal_(0.0, std)
    else:
        draw_normal(name, module, std=std)
