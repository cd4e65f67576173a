"""The gradients of one rank's stages: averaged over replicas, summed over tied parameters, scaled and clamped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.chain import Chain, is_within
from parallel.mesh import Mesh
from parallel.plan import Plan
from parallel.sharding import local
from parallel.stage import Stage

_ROW, _LARGE = 512, 2**16  # elements: of a row that is summed in float32, and of the smallest gradient cut into rows


class Gradients:
    """The gradients that the stages of a rank hold."""

    def __init__(self, stages: Sequence[Stage], chain: Chain, mesh: Mesh, device: torch.device) -> None:
        """Refer to the stages' gradients.

        Args:
            stages: Of this rank.
            chain: The model.
            mesh: The grid of ranks.
            device: Where norms are computed.
        """
        self._stages, self._chain, self._mesh, self._device = stages, chain, mesh, device

    def clear(self) -> None:
        """Clear the last step's gradients.

        With replicas they are views of buckets and stay so, zeroed: gradients of their own beside the buckets would
        take the model's size in memory once more. Where replicas share them, there are no buckets.
        """
        present = self._present()
        if self._mesh.dp_group is not None and self._mesh.shards == 1 and present:
            torch._foreach_zero_(present)
            return
        for stage in self._stages:
            for parameter in stage.layers.parameters():
                parameter.grad = None

    def complete(self) -> None:
        """Give trainable parameters that the step has not used a gradient of zero, in every layout alike.

        Without one, some optimizers leave a parameter alone, and replicas have one as soon as any of them uses it.
        """
        for stage in self._stages:
            for parameter in stage.layers.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def multiply(self, factor: float) -> None:
        """Scale every element."""
        present = self._present()
        if present and factor != 1.0:  # a stage may have no parameters
            torch._foreach_mul_(present, factor)

    def clamp(self, limit: float) -> None:
        """Clamp every element to [-limit, limit]."""
        present = self._present()
        if present:
            torch._foreach_clamp_min_(present, -limit)
            torch._foreach_clamp_max_(present, limit)

    @torch.no_grad()
    def squared_norm(self, of: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad) -> Tensor:
        """Compute this rank's part of the squared norm of the whole model's gradients.

        Replicas have equal gradients, so only the first adds its own, or its ranks their shares. The others add 0, or
        NaN where theirs are not finite. A tied parameter is added where its canonical name is.

        Args:
            of: Gives for each parameter a tensor to add in the place of its gradient, shared out as it is; or None.

        Returns:
            A scalar in ``sum_dtype``.
        """
        tensors = [
            local(tensor)
            for stage in self._stages
            for name, parameter in stage.layers.named_parameters(remove_duplicate=False)
            if name not in self._chain.tied and (tensor := of(parameter)) is not None
        ]
        dtype = sum_dtype(self._device)
        if not tensors:
            return torch.zeros((), dtype=dtype, device=self._device)
        squares = torch.cat([norms.to(self._device) for norms in _norms(tensors, dtype)]).square().sum()
        return squares if self._mesh.copy == 0 else squares * 0

    def _present(self) -> list[Tensor]:
        return [local(p.grad) for stage in self._stages for p in stage.layers.parameters() if p.grad is not None]


def _norms(gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Compute the norms of gradients, or of the rows into which a gradient is cut.

    A sum in float32 depends on how the elements are divided among ranks: for 40 million of them, from the third digit
    on. In float64 a CPU can add only what it has copied to float64, in four times the time. There, the rows of a large
    gradient are summed in float32: they are short, and their errors cancel.

    Returns:
        Tensors of any number of norms each, in ``dtype``.
    """

    def is_cut(gradient: Tensor) -> bool:
        return gradient.device.type == "cpu" and gradient.dtype == torch.float32 and gradient.numel() >= _LARGE

    whole = [gradient for gradient in gradients if not is_cut(gradient)]
    norms = [norm[None] for norm in torch._foreach_norm(whole, 2, dtype)] if whole else []
    for gradient in filter(is_cut, gradients):
        count = gradient.numel()
        rows, rest = gradient.reshape(-1).split([count - count % _ROW, count % _ROW])
        norms += [torch.linalg.vector_norm(rows.view(-1, _ROW), dim=1).to(dtype), rest.to(dtype)]
    return norms


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums over ranks are computed."""
    return torch.float32 if device.type == "mps" else torch.float64


class TiedParameters:
    """Tied parameters that several stages hold: each stage has a copy, and all copies get the summed gradient.

    Copies start equal (they are drawn under the same name) and get equal updates, so they stay equal. Where replicas
    share parameters, a rank has the same rows of each copy.
    """

    def __init__(self, plan: Plan, chain: Chain, stages: Sequence[Stage], mesh: Mesh, timeout_s: float) -> None:
        """Make the process groups of the copies. Every rank of the mesh constructs this.

        Args:
            plan: Says which stages hold which layers.
            chain: Says which parameters are tied.
            stages: Of this rank.
            mesh: The grid of ranks.
            timeout_s: The longest that a rank waits for another.
        """
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
            held = [(stage, name) for stage in stages for name in names if is_within(name, stage.layers.names)]
            if not held:
                continue
            parameters = []
            for stage, name in held:
                parameter = stage.layers.get_parameter(name)
                if not any(parameter is other for other in parameters):
                    parameters.append(parameter)
            if parameters[0].requires_grad:
                self._copies.append((parameters, group))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Set every copy's gradient to the sum of all copies'. Called once per step, after the backward."""
        for parameters, group in self._copies:
            total, *others = [local(parameter.grad) for parameter in parameters]
            for other in others:
                total += other.to(total.device)
            if group is not None:
                dist.all_reduce(total, group=group)
            for other in others:
                other.copy_(total)
