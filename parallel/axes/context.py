"""Context parallelism: all ranks compute every layer, each rank for a part of each sequence.

A sequence of t positions is cut into 2n chunks. Rank r of n has the chunks r and 2n - 1 - r, so that all ranks compute
equally much of a causal attention::

    n = 2        | chunk 0 | chunk 1 | chunk 2 | chunk 3 |
    rank         |    0    |    1    |    1    |    0    |

Layers and loss get [b, t/n, ...]. Only attention exchanges something (``parallel.axes.context_attention``), by the one
function that all models call (``models.attention.attend``). Any other layer that mixes positions is refused
(``parallel.mixing``). Each rank has all parameters, and their gradients are summed over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.errors import PlanError
from data.dataset import Batch, DataSet, mapped
from models.chain import Chain
from models.sequence import computing_part
from parallel.axes.axis import AxisOfStage, Collective, all_reduce_sum
from parallel.axes.context_attention import WAYS, ContextAttention
from parallel.dtensor import local
from parallel.examination import Examination
from parallel.layout import Layout
from parallel.mesh import Mesh
from parallel.mixing import check_positions
from parallel.plan import Plan


class ContextParallel(AxisOfStage):
    """Divides each sequence among the ranks along ``context``."""

    mesh_axes = ("context",)
    keys = ("cp", "context")
    variants = tuple({"cp": 2, "context": way} for way in WAYS)
    degree, divides = "cp", "sequences"
    divides_batch = True

    # -- before a run ------------------------------------------------------------------------------------------------

    @classmethod
    def check_facts(cls, layout: Layout, chain: Chain, found: Examination, recompute: bool = False) -> None:
        """Check that only attention mixes positions. Raises PlanError or ModelError."""
        if layout.cp > 1:
            if chain.prove_parts is not None:
                chain.prove_parts()
            check_positions(chain, found, layout)

    @classmethod
    def check_data(cls, layout: Layout, data: DataSet) -> None:
        """Check that the data's samples are sequences, and that the ranks can divide them. Raises PlanError."""
        if layout.cp == 1:
            return
        sample = Batch(*data.train.read(np.zeros(1, dtype=np.int64), 0))
        tensors, targets = sample.tensors, sample.targets
        lengths = {tensor.shape[1:2] for tensor in tensors}
        if isinstance(targets, tuple) or len(lengths) > 1 or targets.dim() < 2 or data.pairs:
            shapes = ", ".join(str(tuple(tensor.shape[1:])) for tensor in tensors)
            raise PlanError(
                f"parallel.cp={layout.cp} divides sequences, and the samples are not sequences of inputs and targets "
                f"of one length, with one tensor of targets: they are {shapes}. Use a layout without parallel.cp"
            )
        widths, chunks = {targets.shape[1], *getattr(data.train, "widths", ())}, 2 * layout.cp
        multiple = math.lcm(chunks, layout.cp * layout.tp if layout.sequence else 1)
        if uneven := sorted(width for width in widths if width % multiple):
            again = f", and parallel.tp={layout.tp} ranks divide these again (parallel.sequence=true)" * layout.sequence
            way_out = "data.bucket_by_length=false" if len(widths) > 1 else f"data.seq_len to a multiple of {multiple}"
            raise PlanError(
                f"parallel.cp={layout.cp} cuts each sequence into {chunks} equal chunks, two for each rank{again}, and "
                f"there are sequences of {', '.join(map(str, uneven))} positions; set {way_out}"
            )

    @classmethod
    def choices(cls, chain: Chain, data: DataSet, fixed: Mapping[str, Any], max_ranks: int) -> list[dict[str, Any]]:
        """See ``Axis.choices``. Sequences are divided only if the user has typed so."""
        typed = {key: fixed[key] for key in cls.keys if key in fixed}
        cls.check_data(Layout(**typed), data)
        return [typed]

    @classmethod
    def work_of_rank(cls, layout: Layout, work: Any) -> Any:
        """See ``Axis.work_of_rank``."""
        part = work.of_tokens(layout.cp)
        # With ulysses, attention's output is kept by heads and by positions.
        return replace(part, gathered=part.gathered + part.queries) if layout.context == "ulysses" else part

    @classmethod
    def collectives(cls, layout: Layout, work: Any) -> Sequence[Collective]:
        """See ``Axis.collectives``, and ``parallel.axes.context_attention``."""
        n, given = layout.cp, (2 * work.queries + work.keys) / layout.cp
        if not work.queries:
            return []
        if layout.context == "gather":  # the backward gathers again, and returns gradients
            return [Collective("all_gather", 1, work.keys, 1), Collective("all_to_all", 0, work.keys, 1)]
        if layout.context == "ring":
            return [Collective("ring", n - 1, work.keys / n, 2 * n - 1)]
        return [Collective("all_to_all", 4, given / 4, 4)]

    @classmethod
    def describe(cls, layout: Layout) -> str:
        """See ``Axis.describe``."""
        return f"{layout.cp} ranks share each sequence; their attention is parallel.context={layout.context}"

    # -- in a rank ---------------------------------------------------------------------------------------------------

    def __init__(self, name: str, plan: Plan, chain: Chain, mesh: Mesh) -> None:
        """See ``Axis``."""
        super().__init__(name, plan, chain, mesh)
        self.attention: ContextAttention | None = None  # for the length of the newest batch

    def part_of_batch(self, batch: Batch) -> Batch:
        """Return the batch at the positions of this rank."""
        targets = batch.target_tensors[0]
        length, device = targets.shape[1], targets.device
        if self.attention is None or self.attention.length != length:
            self.attention = ContextAttention(self.ranks, self.plan.context, length, device)
        positions = self.attention.positions

        def part(x: Tensor) -> Tensor:
            return x.index_select(1, positions)

        documents = None if batch.documents is None else part(batch.documents)
        return replace(batch, inputs=mapped(part, batch.inputs), targets=part(targets), documents=documents)

    def whole_output(self, x: Tensor) -> Tensor:
        """See ``Axis.whole_output``. Tensors [b, t/n, ...] become [b, t, ...]."""
        assert self.attention is not None  # a batch was divided
        return torch.cat(self.ranks.all_gather(x), 1)[:, self.attention.positions_of.flatten().argsort()]

    def step(self) -> AbstractContextManager:
        """See ``Axis.step``."""
        return computing_part(self.attention)

    def finish_gradients(self, names: Mapping[nn.Parameter, Sequence[str]]) -> None:
        """Sum the gradients of all parameters: each rank has those of its positions."""
        all_reduce_sum([local(p.grad) for p in names if p.grad is not None], self.ranks.group)
