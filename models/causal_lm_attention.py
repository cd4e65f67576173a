"""Attention of transformers' models, and the arguments of their layers, for a part of each sequence.

A model's attention calls a function of transformers' interface. For a part of each sequence that function is ``attend``
below. The mask of a layer becomes a stand-in that says which keys a query sees, and takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from common.errors import ModelError
from models import attention, sequence

_HIDDEN = -1e4  # a number that hides a key when it is added to a score
# Arguments of attention that are passed on, or do not change what it computes from queries, keys, values and mask.
_KNOWN = {"scaling", "softcap", "is_causal", "sliding_window", "position_ids", "cache_position"}
_NAMES = {"s_aux": "sinks", "dropout": "dropout of its own (+model.settings.attention_dropout=0 turns it off)"}


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as a function of transformers' interface: [b, heads, t, width] each -> [b, t, heads, width].

    Raises:
        ModelError: If the attention is not one of ``models.attention.attend``.
    """
    seen = {} if attention_mask is None else vars(attention_mask).get("seen")
    others = [name for name, given in options.items() if name not in _KNOWN and (isinstance(given, Tensor) or given)]
    if seen is None or others:
        named = ", ".join(_NAMES.get(name, name) for name in others) or "a mask that is no causal one or window"
        raise ModelError(f"{type(module).__name__} has attention with {named}; it needs whole sequences, parallel.cp=1")
    y = attention.attend(query, key, value, scale=options.get("scaling"), softcap=options.get("softcap"), **seen)
    return y.transpose(1, 2).contiguous(), None


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
    """
    known: dict[int, Tensor] = {}  # layers have common tensors

    def part(whole: Any, more: Any) -> Any:
        if not isinstance(whole, Tensor):
            return whole
        dims = [dim for dim, size in enumerate(whole.shape) if more.shape[dim] != size]
        if id(whole) not in known and len(dims) > 1:
            known[id(whole)] = torch.zeros((), dtype=whole.dtype).expand(1, 1, len(positions), whole.shape[-1])
            vars(known[id(whole)])["seen"] = seen_by(whole)
        elif id(whole) not in known:
            known[id(whole)] = whole.index_select(dims[0], positions) if dims else whole
        return known[id(whole)]

    return tree_map(part, calls, longer)


def seen_by(mask: Tensor) -> dict[str, int] | None:
    """Return options of ``attend`` for a mask [..., t, t], true or 0 where a key is seen; None if there are none."""
    shown, rows = mask if mask.dtype == torch.bool else mask == 0, torch.arange(mask.shape[-1])
    if mask.dtype != torch.bool and not (shown | (mask < _HIDDEN)).all():
        return None
    window = int(shown.flatten(0, -2)[-1].sum())
    both = {}, {"window": window}
    return next((each for each in both if (attention.visible(rows, rows, **each) == shown).all()), None)
