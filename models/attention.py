"""Causal self-attention, with a cache of keys and values for generating a text token by token.

All attention goes through ``attend``, so that processes can share a sequence (``models.sequence``). All layers of a
model with ``Chain.continues`` must use the cache: attention layers store their keys and values in it, and layers that
add positions read the positions of the tokens from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import sequence
from models.seeds import Dropout, Samples, default_generator, derive_seed, samples_of

_CHUNK = 64  # queries that attend together to the keys of their documents; of 64, 128 and 256 the fastest on a CPU


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    documents: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Compute causal attention. If this process computes a part of each sequence, the part determines how.

    Args:
        q: Queries [b, heads, t, width].
        k: Keys [b, kv_heads, t, width]. Several query heads use the same head if there are fewer.
        v: Values [b, kv_heads, t, width of values].
        scale: The factor of the products of queries and keys. None for 1 / sqrt(width).
        window: The number of keys that a query sees: the key of its own position, and those just before it. None for
            all keys up to its own position.
        softcap: If given, scores are softcap * tanh(scores / softcap).
        documents: Numbers [b, t]. A query sees only keys with its own number, which are in its own document
            (``models.sequence.documents``) as well. None for one number.
        dropout: Dropout of the probabilities.

    Returns:
        [b, heads, t, width of values].
    """
    if (begins := sequence.documents()) is not None:
        documents = begins if documents is None else (documents.long() << 32) + begins
    if (part := sequence.part()) is not None:
        return part.attend(q, k, v, scale=scale, window=window, softcap=softcap, documents=documents, dropout=dropout)
    mask, length = None, q.shape[2]
    p = dropout.p if dropout is not None and dropout.training else 0.0
    samples = samples_of(q) if p > 0.0 else None
    grouped = q.shape[1] != k.shape[1]
    if begins is not None and documents is not None and p == 0.0 and softcap is None and q.device.type == "cpu":
        return _by_chunks(q, k, v, scale, window, begins, documents)
    if window is not None or documents is not None:
        here = torch.arange(length, device=q.device)
        mask = visible(here, here, window, *(() if documents is None else (documents, documents)))
    if softcap is None and samples is None:
        return F.scaled_dot_product_attention(q, k, v, mask, p, mask is None, scale=scale, enable_gqa=grouped)
    if dropout is not None and samples is not None and softcap is mask is None and q.device.type == "cuda":
        return _sample_by_sample(q, k, v, scale, dropout, samples)
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    unseen = torch.full((length, length) if mask is None else mask.shape, -math.inf, dtype=q.dtype, device=q.device)
    unseen = unseen.triu(1) if mask is None else unseen.masked_fill_(mask, 0.0)
    in_product = softcap is None and unseen.dim() == 2
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    added, products = unseen if in_product else unseen.new_zeros(()), (q.flatten(0, 1), k.flatten(0, 1).mT)
    scores = torch.baddbmm(added, *products, alpha=scale).unflatten(0, q.shape[:2])
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores if in_product else scores + unseen
    probabilities = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    return (probabilities if dropout is None else dropout(probabilities)) @ v


def _by_chunks(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, begins: Tensor, documents: Tensor
) -> Tensor:
    """Attend from chunks of queries to the keys from the first document of each chunk on. Reads numbers."""
    queries, keys, values = (x.split(_CHUNK, 2) for x in (q, k, v))
    places, outputs = torch.arange(q.shape[2], device=q.device), []
    for i, chunk in enumerate(queries):
        first = int(begins[:, i * _CHUNK].min()) // _CHUNK
        here, there = slice(i * _CHUNK, (i + 1) * _CHUNK), slice(first * _CHUNK, (i + 1) * _CHUNK)
        mask = visible(places[here], places[there], window, documents[:, here], documents[:, there])
        k, v = (torch.cat(x[first : i + 1], 2) for x in (keys, values))
        grouped = q.shape[1] != k.shape[1]
        outputs.append(F.scaled_dot_product_attention(chunk, k, v, mask, scale=scale, enable_gqa=grouped))
    return torch.cat(outputs, 2)


def visible(queries: Tensor, keys: Tensor, window: int | None = None, *documents: Tensor) -> Tensor:
    """Return which keys each query sees, from their positions: [queries, keys], or [b, 1, queries, keys].

    ``documents`` are the numbers of the queries' documents, [b, queries], and of the keys', [b, keys]. See ``attend``.
    """
    distance = queries[:, None] - keys
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return mask & (documents[0][:, None, :, None] == documents[1][:, None, None]) if documents else mask


def _sample_by_sample(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: Dropout, samples: Samples
) -> Tensor:
    """Attend with torch's kernel, which draws its own numbers, and is therefore seeded and called for each sample."""
    grouped = q.shape[1] != k.shape[1]
    call = partial(F.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=grouped)
    if samples.notes is not None:
        samples.notes.append((dropout.full_name, tuple(q.shape)))
        return call(q, k, v)
    seed = samples.seed_of_call(dropout.full_name)
    parts = {} if dropout.part is None else dropout.part(q.shape, samples.count)
    for dim, part in parts.items():  # each rank has different heads
        seed = derive_seed(seed, int(part.indices[0]) * math.prod(q.shape[dim + 1 :]))
    generator, each, outputs = default_generator(q.device), len(q) // samples.count, []
    for i, sample in enumerate(zip(*(x.split(each) for x in (q, k, v)), strict=True)):
        generator.manual_seed(derive_seed(seed, samples.first + i))
        outputs.append(call(*sample, dropout_p=dropout.p))
    return torch.cat(outputs)


class Reordered:
    """A part with all positions of each sequence, in another order, which changes no token's numbers."""

    def __init__(self, positions: Tensor) -> None:
        self.positions, self.length = positions, len(positions)

    def attend(self, *tensors: Tensor, **options: Any) -> Tensor:
        """See ``SequencePart``. It has one document."""
        back = self.positions.argsort()
        with sequence.computing_part(None), sequence.computing_documents(None):
            return attend(*(x[:, :, back] for x in tensors), **options)[:, :, self.positions]


class KeyValueCache:
    """Keys and values of all attention layers. Slot i of a row belongs to position i of the row.

    The first forward takes whole texts from position 0 on, padded at the end. Attention is causal, so no token sees the
    padding after it. Each later forward takes one token per row. ``advance`` sets the positions of these tokens.
    """

    def __init__(self, capacity: int) -> None:
        """Make an empty cache of ``capacity`` positions per row. Layers add their tensors in their first forward."""
        self.capacity = capacity
        self._positions: Tensor | None = None  # [b], positions of the new tokens; None in the first forward
        self._rows = torch.empty(0)  # [b], 0, 1, ...
        self._used = 0  # the number of slots up to the last position
        self._visible: Tensor | None = None  # [b, 1, 1, slots]: true up to the row's own position; None for all slots
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @property
    def empty(self) -> bool:
        """Whether no forward has run yet."""
        return not self._kept

    def advance(self, positions: Sequence[int], device: torch.device) -> None:
        """Set the positions of the next forward's tokens, one position per row."""
        self._positions = torch.tensor(positions, device=device)
        self._rows = torch.arange(len(positions), device=device)
        self._used = max(positions) + 1
        slots = torch.arange(self._used, device=device)
        unequal = min(positions) < max(positions)
        self._visible = (slots <= self._positions[:, None])[:, None, None] if unequal else None

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the next ``length`` tokens: [length] for all rows, or [b, 1]."""
        return torch.arange(length, device=device) if self._positions is None else self._positions[:, None]

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store a layer's new keys and values, and attend to all stored ones. All tensors are [b, heads, t, width].

        Keys and values may have fewer heads. Several query heads then use the same head of keys and values.
        """
        if self._positions is None:
            b, heads, t, width = k.shape
            shape = b, heads, self.capacity, width
            self._kept[layer] = k.new_zeros(shape), v.new_zeros(shape)
            for kept, new in zip(self._kept[layer], (k, v), strict=True):
                kept[:, :, :t] = new
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for kept, new in zip(self._kept[layer], (k, v), strict=True):
            kept[self._rows, :, self._positions] = new[:, :, 0]
        k, v = (kept[:, :, : self._used] for kept in self._kept[layer])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._visible, enable_gqa=True)


class UsesCache:
    """A layer that uses a ``KeyValueCache`` inside of ``caching``; otherwise it computes texts, or parts of them."""

    cache: KeyValueCache | None = None

    def position_rows(self, table: Tensor, length: int) -> Tensor:
        """Return the rows of a position table [positions, c] for the next tokens: [length, c] or [b, 1, c].

        If sequences have several documents, return [b, length, c].
        """
        whole = self.cache is None and sequence.part() is None and sequence.documents() is None
        return table[:length] if whole else table[self.positions(length, table.device)]

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the next tokens: [length] for all rows, [b, 1], or [b, length] in documents."""
        return sequence.positions(length, device) if self.cache is None else self.cache.positions(length, device)


@contextmanager
def caching(users: Sequence[UsesCache], cache: KeyValueCache | None) -> Iterator[None]:
    """Let ``users`` use ``cache`` inside the block. With None they compute whole texts."""
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
        self.width, self.attention = width, Dropout(dropout)

    def attend(self, projected: Tensor) -> Tensor:
        """Attend with queries, keys and values side by side, [b, t, 3 c] -> [b, t, c].

        A rank with some of the heads passes only the columns of these heads.
        """
        b, t, c = projected.shape[0], projected.shape[1], projected.shape[2] // 3
        q, k, v = (part.view(b, t, -1, self.width).transpose(1, 2) for part in projected.split(c, dim=2))
        if self.cache is not None:
            y = self.cache.attend(self, q, k, v)
        else:
            y = attend(q, k, v, dropout=self.attention)
        return y.transpose(1, 2).reshape(b, t, c)
