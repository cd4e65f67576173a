"""Tied parameters that more than one stage holds: each keeps a copy, all copies get the summed gradient.

Copies start equal (they are drawn under the same name) and get equal updates, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from models.chain import Chain, is_within
from parallel.mesh import Mesh
from parallel.plan import Plan
from parallel.stage import Stage


class TiedParameters:
    """Every rank constructs this, since making process groups takes all of them."""

    def __init__(self, plan: Plan, chain: Chain, stages: Sequence[Stage], mesh: Mesh, timeout_s: float) -> None:
        self._copies: list[tuple[list[nn.Parameter], dist.ProcessGroup | None]] = []
        for original in sorted(set(chain.tied.values())):
            names = [original, *(alias for alias, target in chain.tied.items() if target == original)]
            holders = [s.index for s in plan.stages if any(is_within(name, s.layers) for name in names)]
            if len(holders) < 2:
                continue
            positions = sorted({index % mesh.pp for index in holders})
            group = mesh.new_group(
                [[mesh.rank_at(replica, p) for p in positions] for replica in range(mesh.dp)], timeout_s
            )
            mine = [(stage, name) for stage in stages for name in names if is_within(name, stage.layers.names)]
            if not mine:
                continue
            parameters = []
            for stage, name in mine:
                parameter = stage.layers.get_parameter(name)
                if not any(parameter is other for other in parameters):
                    parameters.append(parameter)
            self._copies.append((parameters, group))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients. Called once per step, after the backward."""
        for parameters, group in self._copies:
            total = parameters[0].grad
            for other in parameters[1:]:
                total += other.grad.to(total.device)
            if group is not None:
                dist.all_reduce(total, group=group)
            for other in parameters[1:]:
                other.grad.copy_(total)
