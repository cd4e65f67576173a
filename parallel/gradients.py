"""The gradients of one rank's stages: averaged over replicas, summed over tied parameters, scaled and clamped.

Replicas average them while autograd accumulates gradients into parameters: DistributedDataParallel does that here,
FSDP2 in ``parallel.sharding``, and ``parallel.zero_bubble`` where a backward is split.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from models.chain import Chain, is_within
from parallel.dtensor import local
from parallel.mesh import COPIES, PEERS, PIPELINE, Mesh, reduce_scatter
from parallel.placement import Placement
from parallel.plan import HIERARCHICAL, Plan
from parallel.stage import Stage
from parallel.tensor import TensorParallel

# reportPrivateImportUsage: torch's stubs do not export its _foreach_ functions.

# Averages a flat tensor over the replicas in place; the future is done when the tensor holds the mean.
Average = Callable[[Tensor], Future]

# torch 2.13 renamed the argument and warns about the old name.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}

# The dtype in which gradients are sent; under a hierarchy, between groups.
_COMPRESSED = {"bf16": torch.bfloat16, "fp16": torch.float16, "hierarchical_bf16": torch.bfloat16}

_ROW, _LARGE = 512, 2**16  # the elements of a row that is summed in float32, and of the least gradient cut into rows


class Gradients:
    """The gradients that the stages of a rank hold.

    A tied parameter that several stages hold has a copy in each, and all copies get the summed gradient. Copies start
    equal (they are drawn under the same name) and get equal updates, so they stay equal. If parameters are sharded,
    a rank has the same box of each copy.
    """

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        stages: Sequence[Stage],
        mesh: Mesh,
        device: torch.device,
        timeout_s: float,
        place: Callable[[str, Tensor], Placement],
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        self._device, self._tensor_parallel = device, tensor_parallel
        # True: the parameters that this rank counts. False: those that another rank counts, which holds them as well.
        self._counted: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        # Listed once: iterating over the modules of a ResNet-50 takes a millisecond, and a GPU waits for most of it.
        self._names: dict[nn.Parameter, list[str]] = {}
        for stage in stages:
            for name, parameter in stage.layers.named_parameters(remove_duplicate=False):
                self._names.setdefault(parameter, []).append(name)
                if name not in chain.tied:
                    self._counted[mesh.owns(place(name, parameter).axes)].append(parameter)
        self._in_buckets = mesh.dp_group is not None and plan.shards == 1 and not plan.splits_backward
        self._copies = _copies(plan, chain, stages, mesh, timeout_s)

    def clear(self) -> None:
        """Clear the last step's gradients.

        With replicas, gradients are views of DDP's buckets and are zeroed in place, because gradients outside the
        buckets would take the model's size in memory again. Replicas that shard parameters have no buckets, and neither
        have those with a split backward, where a gradient may have the memory into which the next step receives.
        """
        if self._in_buckets and (present := self._present()):
            torch._foreach_zero_(present)  # pyright: ignore[reportPrivateImportUsage]
            return
        for parameter in self._names:
            parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Complete the gradients after the last backward. All ranks call this, once per step.

        Trainable parameters that the step has not used get a gradient of zero in every layout. Some optimizers skip a
        parameter without a gradient, and with replicas it has one as soon as any of them uses it. Every copy of a tied
        parameter gets the sum of all copies' gradients.
        """
        for parameter in self._names:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if (axis := self._tensor_parallel) is not None:
            parameters = [p for p, names in self._names.items() if p.grad is not None and axis.is_partial(names)]
            _add_up([local(p.grad) for p in parameters if p.grad is not None], axis.tp_axis.group)
        for parameters, group in self._copies:
            total, *others = [local(p.grad) for p in parameters if p.grad is not None]
            for other in others:
                total += other.to(total.device)
            if group is not None:
                dist.all_reduce(total, group=group)
            for other in others:
                other.copy_(total)

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

        If several ranks hold the same tensor, as replicas do, one of them adds it (``Mesh.owns``). The others add 0,
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


def _add_up(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Add gradients up over ranks, in place, all that have one dtype at once."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in alike])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _norms(gradients: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Compute the norms of gradients, or of the rows into which a gradient is cut, on ``device``.

    A sum in float32 depends on how the elements are divided among ranks; for 40 million elements, from the third digit
    on. A sum in float64 takes a CPU four times as long, because it must copy the elements to float64. On a CPU the rows
    of a large gradient are therefore summed in float32: they are short, and their errors cancel.
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
    """Return the dtype in which sums over ranks are computed."""
    return torch.float32 if device.type == "mps" else torch.float64


def _copies(
    plan: Plan, chain: Chain, stages: Sequence[Stage], mesh: Mesh, timeout_s: float
) -> list[tuple[list[nn.Parameter], dist.ProcessGroup | None]]:
    """Return this rank's copies of each tied parameter that several stages hold, and the group of ranks with copies."""
    pipelines, found = mesh.groups(PIPELINE), []
    layers = [[name for stage in plan.stages_of(at) for name in stage.layers] for at in range(len(pipelines[0]))]
    for original in sorted(set(chain.tied.values())):
        names = [original, *(alias for alias, target in chain.tied.items() if target == original)]
        positions = [at for at, there in enumerate(layers) if any(is_within(name, there) for name in names)]
        group = mesh.new_group([[ranks[at] for at in positions] for ranks in pipelines], timeout_s)
        held = [s.layers.get_parameter(name) for s in stages for name in names if is_within(name, s.layers.names)]
        copies = list(dict.fromkeys(held))
        if (group is not None or len(copies) > 1) and copies[0].requires_grad:
            found.append((copies, group))
    return found


def replicate(stage: nn.Module, mesh: Mesh, bucket_mb: float, comm_hook: str) -> nn.Module:
    """Wrap a stage in DistributedDataParallel, unless there is one replica, or nothing is trained.

    Gradients are averaged during the backward, in buckets of about ``bucket_mb`` MiB, by ``averaging``.
    """
    if mesh.dp_group is None or not any(p.requires_grad for p in stage.parameters()):
        return stage
    replicated = DistributedDataParallel(
        stage,
        process_group=mesh.dp_group,
        init_sync=False,  # weights are drawn by name or loaded, so they are equal, which the run checks
        **_NO_BUFFER_SYNC,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,
    )
    stage.register_forward_hook(_reach_parameters)
    if comm_hook != "none":
        replicated.register_comm_hook(averaging(mesh, comm_hook), _average_bucket)
    return replicated


def _reach_parameters(stage: nn.Module, given: tuple, output: Tensor | tuple[Tensor, ...]):
    """Make the stage's output depend on every parameter, because DDP waits for each of them in the backward.

    Parameters that the forward has not used get no gradient this way, which DDP treats as zero. This costs nothing,
    while ``find_unused_parameters`` searches the graph in every backward.
    """
    outputs = list(output) if isinstance(output, tuple) else [output]
    at = next((i for i, tensor in enumerate(outputs) if tensor.requires_grad), None)
    if at is None:
        return output
    outputs[at] = _Reach.apply(outputs[at], *(p for p in stage.parameters() if p.requires_grad))
    return tuple(outputs) if isinstance(output, tuple) else outputs[0]


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = len(parameters)
        return torch.ops.aten._unsafe_view(output, output.shape)  # torch detaches it in place, which fails for a view

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, *([None] * ctx.parameters)


def _average_bucket(average: Average, bucket):  # DDP refuses an annotation in quotes
    return average(bucket.buffer())


def averaging(mesh: Mesh, comm_hook: str) -> Average:
    """Return the function that averages over the replicas of a mesh.

    bf16 and fp16 send gradients in that dtype. hierarchical averages within each group of replicas first, then between
    groups; hierarchical_bf16 does the same, in bf16 between groups.
    """
    dtype = _COMPRESSED.get(comm_hook)
    if comm_hook in HIERARCHICAL and mesh.axis(PEERS).size > 1:
        return _Hierarchical(mesh, dtype)
    assert mesh.dp_group is not None  # there are replicas
    return partial(_average, mesh.dp_group, dtype)


def _average(group: dist.ProcessGroup, dtype: torch.dtype | None, gradients: Tensor) -> Future:
    """Divide the gradients, convert them to ``dtype`` if it is given, sum over the group, and convert back in place.

    torch's own hooks (``bf16_compress_hook``) do the same but check for NCCL.
    """
    gradients /= dist.get_world_size(group)
    small = gradients if dtype is None else gradients.to(dtype)
    work = dist.all_reduce(small, group=group, async_op=True)
    sent = work.get_future()  # pyright: ignore[reportOptionalMemberAccess]  # None only without async_op

    def widen(done: Future) -> Tensor:
        (mean,) = done.value()  # raises the error of the all-reduce
        return mean if dtype is None else gradients.copy_(mean)

    return sent.then(widen)


class _Hierarchical:
    """Reduce-scatter among peers, all-reduce of one part between their groups, all-gather among peers.

    Each rank sends 1/peers of the bytes between groups. The three collectives of a bucket are called before those of
    the next bucket, since all ranks must call the collectives of a process group in one order. On a GPU they run on a
    stream of their own, so that the backward does not wait for them.
    """

    def __init__(self, mesh: Mesh, across: torch.dtype | None) -> None:
        self._copies, self._peers, self._across = mesh.axis(COPIES), mesh.axis(PEERS), across
        self._dp = mesh.dp
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, gradients: Tensor) -> Future:
        if not gradients.is_cuda:
            return self._averaged(gradients)
        if self._stream is None:
            self._stream = torch.cuda.Stream(gradients.device)
        self._stream.wait_stream(torch.cuda.current_stream(gradients.device))
        with torch.cuda.stream(self._stream):
            return self._averaged(gradients)  # waiting for the future waits for the work queued on this stream

    def _averaged(self, gradients: Tensor) -> Future:
        peers, copies = self._peers, self._copies
        each = -(-gradients.numel() // peers.size)
        whole = gradients.new_zeros(each * peers.size)
        torch.div(gradients, self._dp, out=whole[: gradients.numel()])
        part = gradients.new_empty(each)
        reduce_scatter(part, whole, group=peers.group)
        if copies.group is not None:
            sent = part if self._across is None else part.to(self._across)
            dist.all_reduce(sent, group=copies.group)
            part = sent.to(part.dtype)
        dist.all_gather_into_tensor(whole, part, group=peers.group)
        gradients.copy_(whole[: gradients.numel()])
        done = Future(devices=[gradients.device] if gradients.is_cuda else [])
        done.set_result(gradients)
        return done
