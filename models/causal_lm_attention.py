"""Attention of transformers' models, and the arguments of their layers, for a part of each sequence.

A model's attention calls a function of transformers' interface. For a part of each sequence that function is ``attend``
below. The mask of a layer becomes a stand-in that says which keys a query sees, and takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from common.errors import ModelError
from models import attention, sequence

_HIDDEN = -1e4  # a number that hides a key when it is added to a score
# Arguments of attention that do not change what it computes from queries, keys, values and mask.
_FREE = {"sliding_window", "position_ids", "cache_position", "position_embeddings", "output_router_logits"}
_NAMES = {"s_aux": "sinks (s_aux)"}


class Seen(NamedTuple):
    """Which keys a query sees. See ``models.attention.attend``; ``documents`` are numbers [t] for all samples."""

    window: int | None = None
    documents: Tensor | None = None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as a function of transformers' interface: [b, heads, t, width] each -> [b, t, heads, width].

    Raises:
        ModelError: If the attention is not one of ``models.attention.attend``.
    """
    seen = Seen() if attention_mask is None else vars(attention_mask).get("seen")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    given = [name for name, value in others.items() if value is not None and value is not False and name not in _FREE]
    why = (
        "a mask that is no causal one, with or without a window or chunks"
        if seen is None
        else "queries that see later keys"
        if attention_mask is None and not causal
        else "dropout of probabilities, which its function draws (+model.settings.attention_dropout=0 turns it off)"
        if dropout
        else ", ".join(_NAMES.get(name, name) for name in given)
    )
    if why or seen is None:
        raise ModelError(f"{type(module).__name__} has attention with {why}; it needs whole sequences, parallel.cp=1")
    documents = None if seen.documents is None else seen.documents.to(query.device).expand(len(query), -1)
    options = {"scale": scaling, "window": seen.window, "softcap": softcap, "documents": documents}
    return attention.attend(query, key, value, **options).transpose(1, 2).contiguous(), None


@cache
def register() -> None:
    """Let all models of transformers attend by ``attend`` while this process computes a part of each sequence."""
    from transformers.modeling_utils import AttentionInterface

    usual = AttentionInterface.get_interface

    def get_interface(self: AttentionInterface, attn_implementation: str, default: Callable) -> Callable:
        return usual(self, attn_implementation, default) if sequence.part() is None else attend

    AttentionInterface.get_interface = get_interface


def cut(calls: Any, longer: Any, positions: Tensor) -> Any:
    """Return the arguments of layers for some positions.

    Args:
        calls: The arguments for all positions: tensors in tuples, lists and dicts.
        longer: The arguments for one more position. Dimensions of tensors that differ are positions.
        positions: [t] int64.

    Raises:
        ModelError: If a tensor that is no mask has a number for each pair of positions.
    """
    known: dict[int, Tensor] = {}  # of the layers' common tensors

    def part(whole: Any, more: Any) -> Any:
        if not isinstance(whole, Tensor) or not isinstance(more, Tensor):
            return whole
        if id(whole) not in known:
            known[id(whole)] = _of_positions(whole, more, positions)
        return known[id(whole)]

    return tree_map(part, calls, longer)


def _of_positions(whole: Tensor, more: Tensor, positions: Tensor) -> Tensor:
    dims = [dim for dim, size in enumerate(whole.shape) if more.shape[dim] != size]
    if len(dims) < 2:
        return whole.index_select(dims[0], positions) if dims else whole
    if dims != [2, 3] or whole.dim() != 4:
        raise ModelError(
            f"layers get {list(whole.shape)}, numbers for pairs of positions, which parallel.cp cannot cut"
        )
    if not hasattr(whole, "seen"):  # kept for other parts
        vars(whole)["seen"] = seen_by(whole)
    mask = torch.zeros((), dtype=whole.dtype).expand(1, 1, len(positions), whole.shape[3])
    seen = vars(whole)["seen"]
    if seen is not None and seen.documents is not None:
        seen = Seen(documents=seen.documents[positions])
    vars(mask)["seen"] = seen
    return mask


def seen_by(mask: Tensor) -> Seen | None:
    """Return the meaning of a mask [b, 1, t, t], true or 0 where a key is seen; None if it is no causal one."""
    visible = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (visible | (mask < _HIDDEN)).all():
        return None
    of_one, rows = visible[0, 0], torch.arange(mask.shape[3])
    starts = of_one.int().argmax(dim=1)[None]  # the first key that a query sees
    for window, documents in ((None, None), (int(of_one[-1].sum()), None), (None, starts)):
        if (attention.visible(rows, rows, window, documents, documents) == visible).all():
            return Seen(window, None if documents is None else starts[0])
    return None
