"""The gradients of one rank's stages: completed by the axes, summed over tied parameters, scaled and clamped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.chain import is_within
from parallel.axes import Axis
from parallel.dtensor import local
from parallel.mesh import PIPELINE, Mesh
from parallel.placement import Placement
from parallel.plan import Plan
from parallel.stage import Stage

Place = Callable[[str, Tensor], Placement]  # of a parameter, by its name

# reportPrivateImportUsage: torch's stubs do not export its _foreach_ functions.

_ROW, _LARGE = 512, 2**16  # the elements of a row that is summed in float32, and of the least gradient cut into rows


class Gradients:
    """The gradients that the stages of a rank hold.

    A tied parameter that several stages hold has a copy in each of them, and all copies get the summed gradient. Copies
    start equal (they are drawn under the same name) and get equal updates, so they stay equal. If parameters are
    sharded, a rank has the same box of each copy.

    Attributes:
        frozen: Parameters that get no gradient in this step.
    """

    def __init__(
        self, plan: Plan, stages: Sequence[Stage], mesh: Mesh, timeout_s: float, place: Place, axes: Sequence[Axis] = ()
    ) -> None:
        self._device, self._axes, tied = stages[0].device, axes, stages[0].chain.tied
        # True: this rank counts the parameter. False: another rank, which holds the parameter too, counts it.
        self._counted: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        # Listed once: iterating over the modules of a ResNet-50 takes a millisecond, and a GPU waits for most of it.
        self._names: dict[nn.Parameter, list[str]] = {}
        for stage in stages:
            for name, parameter in stage.layers.named_parameters(remove_duplicate=False):
                self._names.setdefault(parameter, []).append(name)
                if name not in tied:
                    self._counted[mesh.owns(place(name, parameter).axes)].append(parameter)
        self.frozen: Sequence[nn.Parameter] = ()
        self._in_buckets = mesh.dp_group is not None and plan.shards == 1 and not plan.splits_backward
        self._copies = _copies(plan, stages, mesh, timeout_s)

    def clear(self) -> None:
        """Clear the last step's gradients.

        With replicas, gradients are views of DDP's buckets and are zeroed in place, because gradients outside the
        buckets would take as much memory as the model again. There are no buckets if parameters are sharded or if the
        backward is split. With a split backward, a gradient may occupy the memory into which the next step receives.
        """
        if self._in_buckets and (present := self._present()):
            torch._foreach_zero_(present)  # pyright: ignore[reportPrivateImportUsage]
            return
        for parameter in self._names:
            parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Complete the gradients after the last backward. All ranks call this, once per step.

        Trainable parameters that the step has not used get a zero gradient in every layout. Some optimizers skip a
        parameter without a gradient, and with replicas the parameter has one as soon as any replica uses it. Every copy
        of a tied parameter gets the sum of all copies' gradients.
        """
        for parameter in self._names:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for axis in self._axes:  # replicas first, as in a backward that is not split
            axis.finish_gradients(self._names)
        for parameters, group in self._copies:
            total, *others = [local(p.grad) for p in parameters if p.grad is not None]
            for other in others:
                total += other.to(total.device)
            if group is not None:
                dist.all_reduce(total, group=group)
            for other in others:
                other.copy_(total)
        for parameter in self.frozen:
            parameter.grad = None

    def multiply(self, factor: float) -> None:
        """Scale every element."""
        if factor != 1.0 and (present := self._present()):  # a stage may have no parameters
            torch._foreach_mul_(present, factor)  # pyright: ignore[reportPrivateImportUsage]

    def clamp(self, limit: float) -> None:
        """Clamp every element to [-limit, limit]."""
        if present := self._present():
            torch._foreach_clamp_min_(present, -limit)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_clamp_max_(present, limit)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def squared_norm(self, of: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad) -> Tensor:
        """Compute this rank's part of the squared norm of the whole model's gradients, or of the tensors from ``of``.

        If several ranks hold the same tensor, as replicas do, one rank adds it (``Mesh.owns``). The other ranks add 0,
        or NaN if their copy is not finite. A tied parameter is added by the stage that has its canonical name.
        """
        dtype, sums = sum_dtype(self._device), []
        for counts, parameters in self._counted.items():
            if tensors := [local(tensor) for p in parameters if (tensor := of(p)) is not None]:
                squares = torch.cat(_norms(tensors, dtype, self._device)).square().sum()
                sums.append(squares if counts else squares * 0)
        return reduce(torch.add, sums) if sums else torch.zeros((), dtype=dtype, device=self._device)

    def _present(self) -> list[Tensor]:
        return [local(p.grad) for p in self._names if p.grad is not None]


def _norms(gradients: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Compute the norms of gradients, or of the rows into which a gradient is cut, on ``device``.

    A float32 sum depends on how the elements are divided among ranks: with 40 million elements, sums differ from the
    third digit on. A float64 sum takes four times as long on a CPU, because the elements must be copied to float64. On
    a CPU the rows of a large gradient are therefore summed in float32: rows are short, and their errors cancel.
    """

    def is_cut(gradient: Tensor) -> bool:
        return gradient.device.type == "cpu" and gradient.dtype == torch.float32 and gradient.numel() >= _LARGE

    whole = [gradient for gradient in gradients if not is_cut(gradient)]
    norms: list[Tensor] = []
    if whole:
        each = torch._foreach_norm(whole, 2, dtype)  # pyright: ignore[reportPrivateImportUsage]
        norms.append(torch.stack([norm.to(device) for norm in each]))
    for gradient in filter(is_cut, gradients):
        count = gradient.numel()
        rows, rest = gradient.reshape(-1).split([count - count % _ROW, count % _ROW])
        norms += [torch.linalg.vector_norm(rows.view(-1, _ROW), dim=1).to(device, dtype), rest.to(device, dtype)]
    return norms


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums over ranks."""
    return torch.float32 if device.type == "mps" else torch.float64


def _copies(
    plan: Plan, stages: Sequence[Stage], mesh: Mesh, timeout_s: float
) -> list[tuple[list[nn.Parameter], dist.ProcessGroup | None]]:
    """Return this rank's copies of each tied parameter that several stages hold, and the group of ranks with copies."""
    pipelines, tied, found = mesh.groups(PIPELINE), stages[0].chain.tied, []
    layers = [[name for stage in plan.stages_of(at) for name in stage.layers] for at in range(len(pipelines[0]))]
    for original in sorted(set(tied.values())):
        names = [original, *(alias for alias, target in tied.items() if target == original)]
        positions = [at for at, there in enumerate(layers) if any(is_within(name, there) for name in names)]
        group = mesh.new_group([[ranks[at] for at in positions] for ranks in pipelines], timeout_s)
        held = [s.layers.get_parameter(name) for s in stages for name in names if is_within(name, s.layers.names)]
        copies = list(dict.fromkeys(held))
        if (group is not None or len(copies) > 1) and copies[0].requires_grad:
            found.append((copies, group))
    return found
