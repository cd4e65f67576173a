"""Causal self-attention, with a cache of keys and values for generating a text token by token.

All layers of a model with ``Chain.continues`` must use the cache: attention layers store their keys and values in it,
and layers that add positions read the positions of the tokens from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.seeds import CausalAttentionDropout


class KeyValueCache:
    """Keys and values of all attention layers. Slot i of a row belongs to position i of the row.

    The first forward takes whole texts from position 0 on, padded at the end. Attention is causal, so no token sees the
    padding after it. Each later forward takes one token per row. ``advance`` sets the positions of these tokens.
    """

    def __init__(self, capacity: int) -> None:
        """Make an empty cache of ``capacity`` positions per row. Layers add their tensors in their first forward."""
        self.capacity = capacity
        self._positions: Tensor | None = None  # [b], positions of the new tokens; None in the first forward
        self._visible: Tensor | None = None  # [b, 1, 1, slots]: true up to the row's own position
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @property
    def empty(self) -> bool:
        """Whether no forward has run yet."""
        return not self._kept

    def advance(self, positions: Sequence[int], device: torch.device) -> None:
        """Set the positions of the next forward's tokens, one position per row."""
        self._positions = torch.tensor(positions, device=device)
        slots = torch.arange(max(positions) + 1, device=device)
        self._visible = (slots <= self._positions[:, None])[:, None, None]

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the next ``length`` tokens: [length] for all rows, or [b, 1]."""
        return torch.arange(length, device=device) if self._positions is None else self._positions[:, None]

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store a layer's new keys and values, and attend to all stored ones. All tensors are [b, heads, t, width].

        Keys and values may have fewer heads. Several query heads then use the same head of keys and values.
        """
        if self._visible is None:
            b, heads, t, width = k.shape
            shape = b, heads, self.capacity, width
            self._kept[layer] = k.new_zeros(shape), v.new_zeros(shape)
            for kept, new in zip(self._kept[layer], (k, v), strict=True):
                kept[:, :, :t] = new
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        rows = torch.arange(len(q), device=q.device)
        for kept, new in zip(self._kept[layer], (k, v), strict=True):
            kept[rows, :, self._positions] = new[:, :, 0]
        k, v = (kept[:, :, : self._visible.shape[-1]] for kept in self._kept[layer])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._visible, enable_gqa=True)


class UsesCache:
    """A layer that uses a ``KeyValueCache`` inside of ``caching``; otherwise it computes whole texts."""

    cache: KeyValueCache | None = None

    def position_rows(self, table: Tensor, length: int) -> Tensor:
        """Return the rows of a position table [positions, c] for the next tokens: [length, c] or [b, 1, c]."""
        return table[:length] if self.cache is None else table[self.cache.positions(length, table.device)]

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the next tokens: [length] for all rows, or [b, 1]."""
        return torch.arange(length, device=device) if self.cache is None else self.cache.positions(length, device)


@contextmanager
def caching(layers: nn.Module, cache: KeyValueCache | None) -> Iterator[None]:
    """Let all layers that can use ``cache`` do so inside the block. With None they compute whole texts."""
    users = [module for module in layers.modules() if isinstance(module, UsesCache)]
    for module in users:
        module.cache = cache
    try:
        yield
    finally:
        for module in users:
            module.cache = None


class CausalAttention(UsesCache, nn.Module):
    """Attention between the projection to queries, keys and values and the output projection."""

    def __init__(self, width: int, dropout: float) -> None:
        """``width`` is the width of each head."""
        super().__init__()
        self.width, self.attention = width, CausalAttentionDropout(dropout)

    def attend(self, projected: Tensor) -> Tensor:
        """Attend with queries, keys and values side by side, [b, t, 3 c] -> [b, t, c].

        A rank with some of the heads passes only the columns of these heads.
        """
        b, t, c = projected.shape[0], projected.shape[1], projected.shape[2] // 3
        q, k, v = (part.view(b, t, -1, self.width).transpose(1, 2) for part in projected.split(c, dim=2))
        if self.cache is not None:
            y = self.cache.attend(self, q, k, v)
        else:
            y = self.attention(q, k, v)
        return y.transpose(1, 2).reshape(b, t, c)
