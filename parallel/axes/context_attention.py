"""Causal attention of a sequence that is divided among ranks, equal to the attention of one process.

A sequence of t positions is cut into 2n chunks. Rank r of n ranks has chunks r and 2n-1-r, so that all ranks compute
equally much. Each query attends to all keys before its chunk (w, whole blocks), and to its own chunk causally (c). For
n=2:

                              keys of chunk   0  1  2  3
    rank 0    queries of chunk 0              c
              queries of chunk 3              w  w  w  c
    rank 1    queries of chunk 1              w  c
              queries of chunk 2              w  w  c

So the keys of each rank are one block. A rank attends to its own keys causally. All of its queries see the first chunk
of a rank before it, and the queries of its second chunk see both chunks of a rank after it.

``parallel.context`` chooses how queries meet the keys and values of other ranks:

* ``gather``: each rank gathers all keys and values. The backward gathers them again, so a rank keeps only its own, and
  sends each rank the gradients of its keys and values.
* ``ring``: keys and values go from rank to rank in n rounds, and in the backward their gradients go with them. Every
  round receives into new memory, and is sent on while its block is computed.
* ``ulysses`` (Jacobs et al. 2023): each rank gets the whole sequence for 1/n of the heads, and computes as one process.

In ``gather`` and ``ring``, the results of blocks are merged by the logarithms of their sums of exponentials (Liu et al.
2023). The backward of each block gets the final output and logarithm, with which its gradients are exact.

A rank sends these numbers per layer and sample. m = t/n is its number of positions, q and k are the numbers of heads of
queries and keys, both of this rank, and w is the width of a head:

    parallel.context   forward                        backward
    gather             all-gather   2 (n-1) m k w     the same, and all-to-all 2 (n-1) m k w
    ring               n-1 sends    2 m k w each      2n-1 sends 2 m k w each, n of these of float32 or wider
    ulysses            all-to-all   2 (n-1)/n m (q + k) w, in four collectives, forward and backward

With document numbers, each forward also gathers these, (n-1) m integers. For its backward, a rank keeps the queries,
keys, values and outputs of its positions; ``ulysses`` keeps those of its heads, and outputs of its positions as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import PlanError
from models.attention import attend, visible
from models.seeds import Dropout, Part, Parts
from models.sequence import computing_documents, computing_part
from parallel.axes.exchange import AllToAll
from parallel.mesh import Ranks

WAYS = ("gather", "ulysses", "ring")
aten = torch.ops.aten
_Seen = tuple[Tensor, Tensor, Tensor]  # a block's positions of queries and of keys, and which keys each query sees


class ContextAttention:
    """This rank's part of each sequence (``models.sequence.SequencePart``).

    Attributes:
        length: The number of positions of the whole sequence.
        chunk: The number of positions of a chunk.
        positions_of: The positions of each rank's tokens, [n, length / n] int64.
        positions: Those of this rank.
    """

    def __init__(self, ranks: Ranks, way: str, length: int, device: torch.device) -> None:
        """Divide sequences of ``length`` positions among ``ranks``. ``way`` is ``gather``, ``ulysses`` or ``ring``.

        Raises:
            PlanError: If the length is not a multiple of twice the number of ranks.
        """
        n = ranks.size
        if length % (2 * n):
            raise PlanError(f"parallel.cp={n} cannot cut {length} positions into {2 * n} equal chunks; set seq_len")
        self.ranks, self.way, self.length, self.chunk = ranks, way, length, length // (2 * n)
        first, second = torch.arange(length, device=device).view(2, n, self.chunk)
        self.positions_of = torch.cat((first, second.flip(0)), 1)
        self.positions = self.positions_of[ranks.index]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, documents: Tensor | None = None, dropout: Any = None, **options: Any
    ) -> Tensor:
        """Attend from this rank's queries to the keys of the whole sequence. See ``models.attention.attend``.

        Raises:
            PlanError: If a tensor does not have this rank's number of positions.
        """
        m = len(self.positions)
        if not q.shape[2] == k.shape[2] == m:
            raise PlanError(f"attention gets {q.shape[2]} queries and {k.shape[2]} keys, not {m}; set parallel.cp=1")
        if torch.is_autocast_enabled(q.device.type):  # torch's attention would cast them
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        if documents is not None:
            documents = _in_order(torch.stack(self.ranks.all_gather(documents)), 1)
        if self.way == "ulysses":
            dropout = None if dropout is None else self._of_heads(dropout, q.shape[1])
            with computing_part(None), computing_documents(None):
                out = attend(*map(self._to_heads, (q, k, v)), documents=documents, dropout=dropout, **options)
            return self._to_positions(out)
        drawn = None if dropout is None else dropout.draw(q)
        special = documents, drawn, options.get("window"), options.get("softcap")
        if _has_kernel(q, v) and all(each is None for each in special):
            return _Blocks.apply(q, k, v, _Flash(self, options.get("scale")))
        return _Blocks.apply(q, k, v, _Dense(self, documents, drawn, **options))

    # -- exchange ----------------------------------------------------------------------------------------------------

    def rounds(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the index of each rank with its keys and values. This rank's, ``kv`` [b, heads, t, ...], are first."""
        n, r = self.ranks.size, self.ranks.index
        if self.way == "gather":
            received = [torch.empty_like(kv) for _ in range(n)]
            work: Any = dist.all_gather(received, kv, group=self.ranks.group, async_op=True)
            yield r, kv
            work.wait()
            yield from ((i % n, received[i % n]) for i in range(r + 1, r + n))
            return
        for i in range(n - 1):
            wait = self._pass_on(kv)
            yield (r - i) % n, kv
            kv = wait()
        yield (r + 1) % n, kv

    def home(self, gradients: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the gradient of this rank's keys and values from the gradients of all rounds of all ranks.

        ``gather`` sends them as ``dtype``.
        """
        if self.way == "gather":
            of_ranks = torch.stack([*gradients]).roll(self.ranks.index, 0)
            return AllToAll.apply(of_ranks.to(dtype), self.ranks.group).sum(0, dtype=of_ranks.dtype)
        wait = self._pass_on(next(gradients))
        for gradient in gradients:
            wait = self._pass_on(gradient.add_(wait()))
        return wait()

    def _pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to send ``x`` to the next rank. The result waits, and returns the tensor of the previous rank."""
        ranks, i, group = self.ranks.ranks, self.ranks.index, self.ranks.group
        received = torch.empty_like(x)  # never the memory of an earlier round, which a block may still read
        there = dist.P2POp(dist.isend, x, ranks[(i + 1) % len(ranks)], group)
        works = dist.batch_isend_irecv([there, dist.P2POp(dist.irecv, received, ranks[i - 1], group)])

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait

    def _to_heads(self, x: Tensor) -> Tensor:
        """Exchange some positions of all heads for all positions of some heads."""
        return _in_order(AllToAll.apply(torch.stack(x.chunk(self.ranks.size, 1)), self.ranks.group), 2)

    def _to_positions(self, x: Tensor) -> Tensor:
        """Undo ``_to_heads``."""
        chunks = x.chunk(2 * self.ranks.size, 2)
        parts = [torch.cat((chunks[i], chunks[-1 - i]), 2) for i in range(self.ranks.size)]
        return torch.cat([*AllToAll.apply(torch.stack(parts), self.ranks.group)], 1)

    def _of_heads(self, whole: Dropout, heads: int) -> Dropout:
        """Return the dropout of the 1/n of ``heads`` that this rank computes."""

        def part(shape: Sequence[int], count: int) -> Parts:
            parts = {} if whole.part is None else whole.part((shape[0], heads, *shape[2:]), count)
            indices, size = parts.get(1, Part(range(heads), heads))
            first = self.ranks.index * shape[1]
            return {1: Part(indices[first : first + shape[1]], size)}

        dropout = copy(whole)
        dropout.part = part
        return dropout


def _in_order(parts: Tensor, dim: int) -> Tensor:
    """Put the parts of all ranks, [n, ...], in the order of the sequence, along ``dim`` of a part."""
    first, second = parts.chunk(2, dim + 1)
    return torch.cat((*first, *second.unbind()[::-1]), dim)


class _Blocks(torch.autograd.Function):
    """Attention in blocks, each of some queries of this rank and some keys of one rank."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, kernel: _Flash | _Dense) -> Tensor:
        q, kv, widths = q if q.stride(-1) == 1 else q.contiguous(), torch.cat((k, v), -1), (k.shape[-1], v.shape[-1])
        exact = torch.promote_types(q.dtype, torch.float32)
        b, heads, t, _ = q.shape
        # As from torch's attention, the heads of a token are neighbours: what follows needs no copy.
        out = q.new_zeros((b, t, heads, widths[1]), dtype=exact).transpose(1, 2)
        lse = q.new_full((b, heads, t), -torch.inf, dtype=exact)
        with torch.autocast(q.device.type, enabled=False):
            for rank, pairs in kernel.part.rounds(kv):
                for rows, columns, seen in kernel.blocks(rank):
                    keys, values = pairs[:, :, columns].split(widths, -1)
                    new, of_new = kernel.forward(q[:, :, rows], keys, values, seen)
                    before = lse[:, :, rows]
                    out[:, :, rows].lerp_(new.to(exact), torch.sigmoid(of_new - before)[..., None])
                    lse[:, :, rows] = torch.logaddexp(before, of_new)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.given = kernel, widths
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise PlanError("parallel.cp > 1 has no gradients of gradients (create_graph=True); set parallel.cp=1")
        q, kv, out, lse = ctx.saved_tensors
        kernel, widths = ctx.given
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        dq = torch.zeros_like(q, dtype=lse.dtype)

        def gradients() -> Iterator[Tensor]:
            for rank, pairs in kernel.part.rounds(kv):
                gradient = torch.zeros_like(pairs, dtype=lse.dtype)
                for rows, columns, seen in kernel.blocks(rank):
                    given = (x[:, :, rows] for x in (grad, q, out, lse))
                    of_q, of_k, of_v = kernel.backward(*given, *pairs[:, :, columns].split(widths, -1), seen)
                    dq[:, :, rows] += of_q
                    gradient[:, :, columns] += torch.cat((of_k, of_v), dim=-1)
                yield gradient

        with torch.autocast(q.device.type, enabled=False):
            dk, dv = kernel.part.home(gradients(), q.dtype).to(q.dtype).split(widths, -1)
        return dq.to(q.dtype), dk, dv, None


# Kernels compute blocks. ``blocks`` yields the blocks of this rank's queries and the keys of a rank: rows, columns, and
# which keys each query sees. ``forward`` returns a block's output, and the logarithms of its sums of exponentials.
# ``backward`` gets the output and the logarithms of all blocks together.


@dataclass
class _Flash:
    """torch's kernels of attention, which hold no scores. They are private: torch 2.13 (on CUDA, not tried)."""

    part: ContextAttention
    scale: float | None

    def blocks(self, rank: int) -> Iterator[tuple[slice, slice, Any]]:
        """Yield the one block of a rank, and whether it is causal."""
        here, chunk = self.part.ranks.index, self.part.chunk
        yield slice(chunk if rank > here else 0, None), slice(chunk if rank < here else None), rank == here

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        kernel = getattr(aten, "_scaled_dot_product_flash_attention" + "_for_cpu" * (q.device.type == "cpu"))
        return kernel(q, k, v, 0.0, causal, scale=self.scale)[:2]

    def backward(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool):
        if q.device.type == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, causal, scale=self.scale
            )
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout
        given = grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
        return aten._scaled_dot_product_flash_attention_backward(*given, scale=self.scale)


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    on_cuda = q.device.type == "cuda" and q.element_size() == 2 and q.shape[-1] in range(8, 257, 8)
    return q.shape[-1] == v.shape[-1] and (q.device.type == "cpu" or on_cuda)


@dataclass
class _Dense:
    """Scores of one chunk of queries and one chunk of keys, with all that ``attend`` knows."""

    part: ContextAttention
    documents: Tensor | None  # [b, length]
    drawn: Any  # the dropout of the probabilities (``models.seeds.Drawn``), or None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None

    def blocks(self, rank: int) -> Iterator[tuple[slice, slice, Any]]:
        """Yield the blocks in which a query sees a key. The diagonal is first: in it, each query sees a key."""
        first, second = slice(0, self.part.chunk), slice(self.part.chunk, None)
        for rows, columns in ((first, first), (second, second), (second, first)):
            here, there = self.part.positions[rows], self.part.positions_of[rank, columns]
            documents = () if self.documents is None else (self.documents[:, x] for x in (here, there))
            mask = visible(here, there, self.window, *documents)
            if mask.any():
                yield rows, columns, (here, there, mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: _Seen) -> tuple[Tensor, Tensor]:
        kept, lse, _ = self._kept(q, k, seen)
        return kept @ _for_each_query(v, q), lse

    def backward(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, seen: _Seen):
        grad, q, k = (x.detach().to(lse.dtype).requires_grad_() for x in (grad, q, k))
        with torch.enable_grad():
            kept, _, probabilities = self._kept(q, k, seen, lse)
        # lse depends on all scores: the larger one is, the smaller are the probabilities of its query, in all blocks.
        smaller = -(grad * out).sum(-1, keepdim=True).expand_as(probabilities)
        of_kept, of_v = grad @ _for_each_query(v, q).mT, (kept.mT @ grad).unflatten(1, (k.shape[1], -1)).sum(2)
        return *torch.autograd.grad((kept, probabilities), (q, k), (of_kept, smaller)), of_v

    def _kept(self, q: Tensor, k: Tensor, seen: _Seen, known: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the probabilities after dropout, the logarithms, ``known`` if given, and the probabilities."""
        here, there, mask = seen
        k = _for_each_query(k, q)
        scores = q.to(k.dtype) * (q.shape[-1] ** -0.5 if self.scale is None else self.scale) @ k.mT
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        scores.detach().masked_fill_(~mask, -torch.inf)  # the gradient is 0 as the probability is
        lse = scores.logsumexp(-1) if known is None else known
        # A query that sees no key of the block has the logarithm -inf: its output is 0, and has no share.
        probabilities = kept = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp_()
        if self.drawn is not None:
            parts = {2: Part(here, self.part.length), 3: Part(there, self.part.length)}
            kept = probabilities * self.drawn.mask(probabilities, parts)
        return kept, lse, probabilities


def _for_each_query(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values with one head for each head of queries, in float32 or wider."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).to(torch.promote_types(x.dtype, torch.float32))
