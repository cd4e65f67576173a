"""Layouts as the planner describes them, and how they cut layers into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil
from typing import Any

from parallel.axes import Axis, axes_of
from parallel.layout import Layout
from parallel.partition import T, blocks, even_split
from parallel.plan import Plan


@dataclass(frozen=True)
class PlannedLayout(Layout):
    """A layout with all other choices that decide the seconds of a step.

    Attributes:
        samples: The number of samples per micro-batch.
        recompute: "none"; "full" to keep only each layer's input; "selective" to recompute attention.
        overlaps: Whether gradients are reduced during the last backward.
        scatters: Whether each of the ranks that split layers sends a part of a whole tensor to the next stage, which
            gathers the tensor, as in Megatron-LM.
        zero1: Whether replicas shard the optimizer states and the weights that the optimizer updates (ZeRO-1), and
            gather weights in the compute dtype. No strategy of this project does so.
        gradient: Bytes per number of the gradients that replicas sum. Megatron-LM sums them in fp16 when it trains in
            fp16.
        ends_on_top: Whether the first and the last layer come on top of an equal number of layers per stage, as in
            Megatron-LM.
        node: The number of devices per node.
    """

    schedule: str = "gpipe"  # never None, even if one process runs all stages
    samples: int = 1
    recompute: str = "none"
    overlaps: bool = True
    scatters: bool = False
    zero1: bool = False
    gradient: int = 4
    ends_on_top: bool = False
    node: int = 1

    @classmethod
    def of_plan(cls, plan: Plan) -> PlannedLayout:
        """Return the layout of a run's plan."""
        said = {key.name: getattr(plan, key.name) for key in fields(Layout)}
        said["schedule"] = plan.schedule or cls.schedule
        return cls(**said, samples=plan.microbatch_size, recompute="full" if plan.recompute else "none")

    @property
    def group(self) -> int:
        """The number of neighboring replicas that reduce gradients in their group first; for hsdp, those of a node."""
        by_node = self.shard is None and self.info.shards == "node"
        return max(1, self.node // (self.ranks_per_stage * self.pp)) if by_node else super().group

    @cached_property
    def divided_along(self) -> list[tuple[str, type[Axis]]]:
        """The axes along which there are several ranks. See ``axes_of``."""
        return axes_of(self)

    @property
    def of_states(self) -> int:
        """The number of ranks among which optimizer states and the weights updated by the optimizer are sharded."""
        return self.dp if self.zero1 else self.shards

    @property
    def nodes(self) -> int:
        """The number of nodes that the layout needs."""
        return nodes_for(self.processes, self.node)

    @property
    def resharded(self) -> bool:
        """Whether sharded parameters are gathered one layer at a time."""
        return not self.pipelined if self.reshard is None else self.reshard

    def keys(self) -> dict[str, Any]:
        """Return the keys that a planner chooses, of the sections ``parallel`` and ``train``."""
        return {**super().keys(), "activation_checkpointing": self.recompute == "full"}

    def words(self) -> list[str]:
        """Return the words that select the layout on a command line."""
        return super().words() + ["train.activation_checkpointing=true"] * (self.recompute == "full")

    @property
    def name(self) -> str:
        """The layout in a few words."""
        return super().name + " recompute" * (self.recompute == "full")


def nodes_for(processes: int, per_node: int) -> int:
    """Return the number of nodes that this many processes need."""
    return ceil(processes / per_node)


def cut(layers: Sequence[T], layout: PlannedLayout) -> list[Sequence[T]]:
    """Cut the layers into stages."""
    counts = list(layout.counts) or even_split(len(layers) - 2 * layout.ends_on_top, layout.pp * layout.per_rank)
    if layout.ends_on_top:
        counts[0] += 1
        counts[-1] += 1
    return blocks(layers, counts)
