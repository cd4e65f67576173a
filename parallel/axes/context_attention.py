"""Causal attention of a sequence that is divided among ranks, equal to the attention of one process.

A sequence of t positions is cut into 2n chunks. Rank r of n ranks has chunks r and 2n-1-r, so that all ranks compute
equally much. Each query attends to all keys before its chunk (w, whole blocks), and to its own chunk causally (c). For
n=2:

                              keys of chunk   0  1  2  3
    rank 0    queries of chunk 0              c
              queries of chunk 3              w  w  w  c
    rank 1    queries of chunk 1              w  c
              queries of chunk 2              w  w  c

``parallel.context`` chooses how queries meet the keys and values of other ranks:

* ``gather``: each rank gathers all keys and values. The backward gathers them again, so a rank keeps only its own, and
  sends each rank the gradients of its keys and values.
* ``ring``: keys and values go from rank to rank in n rounds, and in the backward their gradients go with them. Every
  round receives into new memory, and is sent on while its blocks are computed.
* ``ulysses`` (Jacobs et al. 2023): each rank gets the whole sequence for 1/n of the heads.

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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import PlanError
from models.attention import attend, visible
from models.seeds import Part
from models.sequence import computing_part
from parallel.mesh import Ranks

WAYS = ("gather", "ulysses", "ring")
aten = torch.ops.aten
_Pairs = tuple[Tensor, Tensor, Tensor]  # a block's positions of queries and of keys, and which keys each query sees


class ContextAttention:
    """This rank's part of each sequence (``models.sequence.SequencePart``).

    Attributes:
        length: The number of positions of the whole sequence.
        positions: The positions of this rank's tokens, [length / n] int64.
        chunk: The number of positions of a chunk.
        queries: The numbers of the chunks from whose queries this rank attends, ascending.
    """

    def __init__(self, ranks: Ranks, way: str, length: int, device: torch.device) -> None:
        """Divide sequences of ``length`` positions among ``ranks``. ``way`` is ``gather``, ``ulysses`` or ``ring``.

        Raises:
            PlanError: If the length is not a multiple of twice the number of ranks.
        """
        chunks = 2 * ranks.size
        if length % chunks:
            raise PlanError(
                f"parallel.cp={ranks.size} cuts each sequence into {chunks} equal chunks, and there is a sequence of "
                f"{length} positions; set data.seq_len to a multiple of {chunks}"
            )
        self.ranks, self.way, self.length, self.chunk = ranks, way, length, length // chunks
        here = (ranks.index, chunks - 1 - ranks.index)
        self.positions = torch.cat([_positions(i, self.chunk, device) for i in here])
        self.queries: Sequence[int] = range(chunks) if way == "ulysses" else here

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, documents: Tensor | None = None, dropout: Any = None, **options: Any
    ) -> Tensor:
        """Attend from this rank's queries to the keys of the whole sequence. See ``models.attention.attend``.

        Raises:
            PlanError: If a tensor does not have this rank's number of positions, or ``ulysses`` cannot divide the
                heads.
        """
        n, heads, kv_heads, is_ulysses = self.ranks.size, q.shape[1], k.shape[1], self.way == "ulysses"
        if not q.shape[2] == k.shape[2] == len(self.positions):
            raise PlanError(
                f"parallel.cp={n}: this rank has {len(self.positions)} of {self.length} positions, and attention gets "
                f"{q.shape[2]} queries and {k.shape[2]} keys; set parallel.cp=1"
            )
        if is_ulysses and (heads % n or kv_heads % n):
            raise PlanError(
                f"parallel.context=ulysses divides {heads} heads of queries and {kv_heads} heads of keys among "
                f"parallel.cp={n} ranks; set a parallel.cp that divides both, or parallel.context=ring"
            )
        if torch.is_autocast_enabled(q.device.type):  # torch's attention would cast them
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        drawn = None if dropout is None else dropout.draw(q)
        if documents is not None:
            documents = _in_order(self.ranks.all_gather(documents), 1)
        if is_ulysses:
            q, k, v = (_Exchange.apply(x, self._to_heads, self._to_positions) for x in (q, k, v))
        if is_ulysses and drawn is None:
            with computing_part(None):
                out = attend(q, k, v, documents=documents, **options)
        else:
            special = documents, drawn, options.get("window"), options.get("softcap")
            kind = _Flash if _has_kernel(q, v) and all(each is None for each in special) else _Dense
            out = _Blocks.apply(q, k, v, kind(self, heads, documents, drawn, **options))
        return _Exchange.apply(out, self._to_positions, self._to_heads) if is_ulysses else out

    # -- exchange ----------------------------------------------------------------------------------------------------

    def rounds(self, kv: Tensor) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the numbers of some chunks, ascending, with their keys and values, until all chunks had their turn.

        This rank's own, ``kv`` [b, heads, t, ...], are first.
        """
        n, r = self.ranks.size, self.ranks.index
        if self.way == "ring":
            for source in ((r - i) % n for i in range(n)):
                wait = None if source == (r + 1) % n else self._pass_on(kv)
                yield (source, 2 * n - 1 - source), kv
                kv = kv if wait is None else wait()
            return
        if self.way == "ulysses":  # they are those of the whole sequence
            yield self.queries, kv
            return
        received = [torch.empty_like(kv) for _ in range(n)]
        work: Any = dist.all_gather(received, kv, group=self.ranks.group, async_op=True)
        yield self.queries, kv
        work.wait()
        others = [i for i in range(n) if i != r]
        yield [*others, *(2 * n - 1 - i for i in reversed(others))], _in_order([received[i] for i in others], 2)

    def home(self, gradients: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the gradient of this rank's keys and values from the gradients of all rounds of all ranks.

        ``gather`` sends them as ``dtype``.
        """
        if self.way == "ring":
            wait = None
            for gradient in gradients:
                wait = self._pass_on(gradient if wait is None else gradient.add_(wait()))
            assert wait is not None  # there are n rounds, after which they are back
            return wait()
        own, *others = gradients
        if self.way == "ulysses":
            return own
        parts = _parted(others[0], self.ranks.size - 1, 2)
        parts.insert(self.ranks.index, own)
        return self._all_to_all(torch.stack(parts).to(dtype)).sum(0, dtype=own.dtype)

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
        return _in_order(self._all_to_all(torch.stack(x.chunk(self.ranks.size, 1))), 2)

    def _to_positions(self, x: Tensor) -> Tensor:
        """Undo ``_to_heads``."""
        return torch.cat([*self._all_to_all(torch.stack(_parted(x, self.ranks.size, 2)))], 1)

    def _all_to_all(self, parts: Tensor) -> Tensor:
        """Send ``parts[i]`` to rank i. Return what this rank gets, by rank."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.ranks.group)
        return received


def _positions(chunk: int, size: int, device: torch.device) -> Tensor:
    return torch.arange(chunk * size, (chunk + 1) * size, device=device)


def _in_order(parts: Sequence[Tensor] | Tensor, dim: int) -> Tensor:
    """Put the two chunks of each rank in the order of the sequence."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([*(head for head, _ in halves), *(tail for _, tail in reversed(halves))], dim)


def _parted(x: Tensor, count: int, dim: int) -> list[Tensor]:
    """Undo ``_in_order`` for ``count`` ranks."""
    chunks = x.chunk(2 * count, dim)
    return [torch.cat((chunks[i], chunks[-1 - i]), dim) for i in range(count)]


class _Exchange(torch.autograd.Function):
    """Applies ``there`` to x, and ``back`` to the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Exchange.apply(grad, ctx.back, ctx.there), None, None


class _Blocks(torch.autograd.Function):
    """Attention in blocks, each of one chunk of queries and one or more chunks of keys."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, kernel: _Flash | _Dense) -> Tensor:
        q, kv, widths = q if q.stride(-1) == 1 else q.contiguous(), torch.cat((k, v), -1), (k.shape[-1], v.shape[-1])
        exact = torch.promote_types(q.dtype, torch.float32)
        b, heads, t, _ = q.shape
        # As from torch's attention, the heads of a token are neighbours: what follows needs no copy.
        out = q.new_zeros((b, t, heads, widths[1]), dtype=exact).transpose(1, 2)
        lse = q.new_full((b, heads, t), -torch.inf, dtype=exact)
        with torch.autocast(q.device.type, enabled=False):
            for chunks, pairs in kernel.part.rounds(kv):
                for rows, columns, what in kernel.blocks(chunks):
                    keys, values = pairs[:, :, columns].split(widths, -1)
                    new, of_new = kernel.forward(q[:, :, rows], keys, values, what)
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
            for chunks, pairs in kernel.part.rounds(kv):
                gradient = torch.zeros_like(pairs, dtype=lse.dtype)
                for rows, columns, what in kernel.blocks(chunks):
                    given = (x[:, :, rows] for x in (grad, q, out, lse))
                    of_q, of_k, of_v = kernel.backward(*given, *pairs[:, :, columns].split(widths, -1), what)
                    dq[:, :, rows] += of_q
                    gradient[:, :, columns] += torch.cat((of_k, of_v), dim=-1)
                yield gradient

        with torch.autocast(q.device.type, enabled=False):
            dk, dv = kernel.part.home(gradients(), q.dtype).to(q.dtype).split(widths, -1)
        return dq.to(q.dtype), dk, dv, None


@dataclass(frozen=True)
class _Kernel:
    """How blocks are computed. ``forward`` returns a block's output, and the logarithms of its sums of exponentials.

    ``backward`` gets the output and the logarithms of all blocks together.

    Attributes:
        heads: The number of heads of queries of this rank, of which ``ulysses`` computes 1/n.
        documents: The numbers [b, length] of the whole sequence.
        drawn: The dropout of the probabilities (``models.seeds.Drawn``), or None.
    """

    part: ContextAttention
    heads: int
    documents: Tensor | None
    drawn: Any
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None

    def blocks(self, keys: Sequence[int]) -> Iterator[tuple[slice, slice, Any]]:
        """Yield the blocks of all queries and the keys of some chunks: their rows, and the kernel's last argument."""
        size = self.part.chunk
        for i, query in enumerate(self.part.queries):
            for first, end, what in self.columns(query, keys):
                yield slice(i * size, (i + 1) * size), slice(first * size, end * size), what

    def columns(self, query: int, keys: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        """Yield the blocks of a chunk of queries. The diagonal is first: in it, each query sees a key."""
        raise NotImplementedError


class _Flash(_Kernel):
    """torch's kernels of attention, which hold no scores. They are private: torch 2.13 (on CUDA, not tried)."""

    def columns(self, query: int, keys: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
        past = sum(key < query for key in keys)
        if query in keys:
            yield past, past + 1, True
        if past:
            yield 0, past, False

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


class _Dense(_Kernel):
    """Scores of one chunk of queries and one chunk of keys, with all that ``attend`` knows."""

    def columns(self, query: int, keys: Sequence[int]) -> Iterator[tuple[int, int, _Pairs]]:
        size = self.part.chunk
        for i, key in reversed([*enumerate(keys)]):
            nearest = (query - key - 1) * size + 1
            if key > query or (self.window is not None and nearest >= self.window):
                continue
            here, there = (_positions(chunk, size, self.part.positions.device) for chunk in (query, key))
            documents = () if self.documents is None else (self.documents[:, x] for x in (here, there))
            seen = visible(here, there, self.window, *documents)
            if self.documents is None or seen.any():
                yield i, i + 1, (here, there, seen)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairs: _Pairs) -> tuple[Tensor, Tensor]:
        scores, _, mask = self._scores(q, k, pairs)
        lse = scores.logsumexp(-1)
        # A query that sees no key of the block has the logarithm -inf: its output is 0, and has no share.
        probabilities = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp_()
        return probabilities.mul_(mask) @ _for_each_query(v, q), lse

    def backward(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, pairs: _Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores, slope, mask = self._scores(q, k, pairs)
        grad, probabilities = grad.to(lse.dtype), (scores - lse[..., None]).exp_()
        ds = (grad @ _for_each_query(v, q).mT).mul_(mask).sub_((grad * out).sum(-1, keepdim=True))
        ds.mul_(probabilities).mul_(slope)
        dk, dv = ds.mT @ q.to(ds.dtype), probabilities.mul_(mask).mT @ grad
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
        return ds @ _for_each_query(k, q), dk, dv

    def _scores(self, q: Tensor, k: Tensor, pairs: _Pairs) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """Return the scores, -inf where unseen, their slopes by products of queries and keys, and the dropout."""
        (here, there, seen), keys, mask = pairs, _for_each_query(k, q), 1.0
        slope = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = q.to(keys.dtype) @ keys.mT * slope
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh_()
            slope = (1 - scores**2) * slope
            scores *= self.softcap
        if self.drawn is not None:
            first = self.part.ranks.index * q.shape[1] if q.shape[1] < self.heads else 0
            parts = {1: Part(range(first, first + q.shape[1]), self.heads)}
            parts |= {2: Part(here, self.part.length), 3: Part(there, self.part.length)}
            mask = self.drawn.mask(scores, parts)
        return scores.masked_fill_(~seen, -torch.inf), slope, mask


def _for_each_query(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values with one head for each head of queries, in float32 or wider."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).to(torch.promote_types(x.dtype, torch.float32))


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    width, same = q.shape[-1], q.shape[-1] == v.shape[-1]
    on_cuda = q.device.type == "cuda" and q.element_size() == 2 and width % 8 == 0 and width <= 256
    return same and (q.device.type == "cpu" or on_cuda)
