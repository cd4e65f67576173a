"""The totals of auxiliary losses over all ranks (``models.auxiliary``), and the gradients that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from models.auxiliary import Collected, collecting
from parallel.gradients import sum_dtype
from parallel.mesh import TENSOR, Mesh
from parallel.plan import Plan
from parallel.stage import Stage


class AuxiliaryLosses:
    """The auxiliary losses of one rank's stages.

    Attributes:
        exist: Whether the model has auxiliary losses. It may have sums without a loss.
        in_advance: Whether a pass without gradients must compute the totals, because no forward of a step has computed
            all sums before the first backward.
        value: This rank's share of the losses of the newest step. The shares of all ranks add up to the losses.
    """

    def __init__(
        self, plan: Plan, stages: Sequence[Stage], mesh: Mesh, device: torch.device, divides: set[str]
    ) -> None:
        """``divides`` has the mesh axes along which ranks compute different terms of the loss."""
        self.exist, self._sizes = bool(plan.facts["auxiliary"]), dict(sorted(plan.auxiliary.items()))
        self.in_advance = self.exist and (plan.chunks > 1 or plan.pipelined)
        # Whether this rank's terms of the loss, and its sums, count: ranks along the other axes compute the same ones.
        self._terms_count = mesh.owns(divides)
        self._sums_count = mesh.owns({*divides, *[TENSOR] * plan.sequence})
        self.value = self._zero = torch.zeros(1, dtype=sum_dtype(device), device=device)
        self._stages, self._alone, self._factor = stages, mesh.size == 1, 0.0
        self._collected, self._totals = Collected(), dict[str, Tensor]()

    @contextmanager
    def step(self, factor: float) -> Iterator[None]:
        """Collect the sums of a step. Its loss is multiplied by ``factor`` before the backward."""
        self._collected, self._factor = Collected(open=bool(self._sizes)), factor
        with collecting(self._collected):
            yield
            self.close()

    @torch.no_grad()
    def close(self) -> None:
        """Add up the sums of all ranks, once in a step. All ranks call this together after the forwards.

        The number of targets is added up as well, because the loss of the targets is later divided by it.
        """
        step, zero = self._collected, self._zero
        if not step.open:
            return
        step.open = False
        counts = [sums[1].to(zero) for stage in self._stages for sums in stage.sums]
        mine = [sum(counts, zero) * self._terms_count]
        for key, n in self._sizes.items():
            mine += [step.sums.get(key, zero.expand(n)).to(zero) * self._sums_count, zero + (key in step.losses)]
        total = torch.cat(mine)
        if not self._alone:
            dist.all_reduce(total)
        count, *pairs = total.split((1, *(size for n in self._sizes.values() for size in (n, 1))))
        self._totals, ranks = (dict(zip(self._sizes, pairs[i::2], strict=True)) for i in range(2))
        self.value = zero
        for key, loss in step.losses.items():
            with torch.enable_grad(), torch.autocast(zero.device.type, enabled=False):
                value = loss(at := self._totals[key].detach().requires_grad_())
            (gradient,) = torch.autograd.grad(value, at)
            step.gradients[key] = gradient * (self._factor * count)
            self.value = self.value + value.detach() / ranks[key]  # the ranks that have layers with this key

    @torch.no_grad()
    def after_step(self) -> None:
        """Call what follows a step. Called if the step updates the weights."""
        for key, function in self._collected.after.items():
            function(self._totals[key])
