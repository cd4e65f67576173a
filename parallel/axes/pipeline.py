"""The pipeline axis: each rank has different stages. ``parallel.pipeline`` runs them."""

from __future__ import annotations

from typing import Any

from common.errors import PlanError
from parallel.axes.axis import Axis
from parallel.layout import Layout
from parallel.mesh import PIPELINE
from parallel.strategies import StrategyInfo, names_where, strategy_info, suggest


class PipelineStages(Axis):
    """Assigns the layers to ranks, in stages."""

    mesh_axes = (PIPELINE,)

    @classmethod
    def check_keys(cls, section: Any, info: StrategyInfo) -> None:
        """See ``Axis.check_keys``."""
        name = section.name
        if not info.stages and section.pp != 1:
            other = suggest(replicas=info.replicas, stages=True)
            raise PlanError(f"parallel={name} has one stage; parallel.pp={section.pp} needs parallel={other}")
        if info.stage_per_rank and section.pp == 1:
            others = names_where(replicas=info.replicas, stages=False, shards=info.shards, several_devices=False)
            other = next(name for name in others if section.tp == 1 or strategy_info(name).tensor)
            raise PlanError(
                f"parallel={name} runs stages on ranks of their own, but parallel.pp=1 is one stage; use "
                f"parallel={other}, or parallel.pp=2 or more"
            )

    @classmethod
    def allows(cls, info: StrategyInfo, layout: Layout) -> bool:
        """See ``Axis.allows``."""
        return info.stage_per_rank == (layout.pp > 1)
