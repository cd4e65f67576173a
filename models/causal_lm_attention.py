"""Attention of transformers' models, and the arguments of their layers, for a part of each sequence, or for documents.

A model's attention calls a function of transformers' interface. For a part of each sequence that function is ``attend``
below. The mask of a layer becomes a stand-in that says which keys a query sees, and takes no memory. For several
documents in a whole sequence, the function stays transformers' own, and the mask hides the other documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from common.errors import ModelError
from models import attention, sequence

_HIDDEN = -1e4  # a number that hides a key when it is added to a score
_DISTANCES = 128  # number of distances between query and key at which a mask is compared
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


def cut(calls: Any, longer: Any, positions: Tensor, documents: Tensor | None = None) -> Any:
    """Return the arguments of layers for some positions, or for documents.

    Args:
        calls: The arguments for all positions: tensors in tuples, lists and dicts.
        longer: The arguments for one more position. Dimensions of tensors that differ are positions.
        positions: [t] int64, or [b, t] if rows have different ones.
        documents: The documents of whole sequences, [b, t]. Masks then hide other documents; if it is None, masks
            become stand-ins.
    """
    known: dict[int, Tensor] = {}  # layers have common tensors

    def part(whole: Any, more: Any) -> Any:
        if not isinstance(whole, Tensor):
            return whole
        dims = [dim for dim, size in enumerate(whole.shape) if more.shape[dim] != size]
        if id(whole) not in known and len(dims) > 1 and documents is not None:
            others = documents[:, None, :, None] != documents[:, None, None]
            hidden = False if whole.dtype == torch.bool else torch.finfo(whole.dtype).min
            known[id(whole)] = whole.masked_fill(others, hidden)
        elif id(whole) not in known and len(dims) > 1:
            known[id(whole)] = torch.zeros((), dtype=whole.dtype).expand(1, 1, len(positions), whole.shape[-1])
            vars(known[id(whole)])["seen"] = seen_by(whole)
        elif id(whole) not in known and dims and positions.dim() > 1:
            rows = whole.expand(len(positions), *whole.shape[1:]).unbind() if dims[0] else [whole] * len(positions)
            dim = max(dims[0] - 1, 0)
            known[id(whole)] = torch.stack([x.index_select(dim, at) for x, at in zip(rows, positions, strict=True)])
        elif id(whole) not in known:
            known[id(whole)] = whole.index_select(dims[0], positions) if dims else whole
        return known[id(whole)]

    return tree_map(part, calls, longer)


def seen_by(mask: Tensor) -> dict[str, int] | None:
    """Return options of ``attend`` for a mask [..., t, t], true or 0 where a key is seen; None if there are none."""
    if mask.is_meta:
        return vars(mask).get("seen")
    shown = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (shown | (mask < _HIDDEN)).all():
        return None
    return _recognized(lambda query, key: shown[..., query, key], mask.shape[-1])


def _recognized(sees: Callable[[Tensor, Tensor], Tensor], length: int) -> dict[str, int] | None:
    """Compare each query at some distances of keys, all edges among them: a mask [t, t] of a long text is too large."""
    queries = torch.arange(length)[:, None]
    window = int(sees(queries[-1:], queries.T).flatten(0, -2)[-1].sum())
    edges = torch.tensor([-1, 0, 1, window - 1, window, window + 1])
    distances = torch.cat((torch.linspace(-length, length, _DISTANCES).long(), edges)).unique()
    keys = queries - distances
    inside = (keys >= 0) & (keys < length)
    wrong = sees(queries, keys.clamp(0, length - 1)) != (distances >= 0) & (distances < window)
    return None if (wrong & inside).any() else {"window": window} if window < length else {}


@contextmanager
def masks_of_layers(in_memory: bool) -> Iterator[None]:
    """Let transformers make masks on the meta device. Their attribute ``seen`` is what ``seen_by`` returns.

    With ``in_memory`` all masks are numbers, and none is left out.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as functions

    def described(name: str, batch_size: int, q_length: int, kv_length: int, **given: Any) -> Tensor | None:
        if in_memory:
            given = {**given, "allow_is_causal_skip": False}
        if in_memory or q_length != kv_length or given.get("attention_mask") is not None or given.get("use_vmap"):
            return usual[name](batch_size=batch_size, q_length=q_length, kv_length=kv_length, **given)
        rows = torch.arange(batch_size)[:, None, None, None]
        seen = _recognized(partial(given["mask_function"], rows, torch.zeros_like(rows)), q_length)
        if seen == {} and name == "sdpa" and given.get("allow_is_causal_skip", True):
            return None
        mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        vars(mask)["seen"] = seen
        return mask

    usual = {name: functions[name] for name in ("eager", "sdpa")}
    try:
        for name in usual:
            functions[name] = partial(described, name)
        yield
    finally:
        functions.update(usual)
