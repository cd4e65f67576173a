"""Averaging gradients over replicas that hold a copy of the parameters each.

DistributedDataParallel does it while autograd accumulates gradients into parameters. Where a backward is split, they
are not accumulated by autograd, and DDP never sees them (pytorch issue 144530): ``Buckets`` averages those.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from parallel.mesh import Mesh
from parallel.plan import HIERARCHICAL

# Averages a flat tensor over the replicas in place; the future is done when the tensor holds the mean.
Average = Callable[[Tensor], Future]

# torch 2.13 renamed the argument and warns at the old name.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}

# The dtype in which gradients are sent; under a hierarchy, between groups.
_COMPRESSED = {"bf16": torch.bfloat16, "fp16": torch.float16, "hierarchical_bf16": torch.bfloat16}


def replicate(stage: nn.Module, mesh: Mesh, bucket_mb: float, comm_hook: str) -> nn.Module:
    """Wrap a stage in DistributedDataParallel.

    Args:
        stage: The module.
        mesh: The grid of ranks, connected.
        bucket_mb: Gradients are sent in buckets of about this many MiB, during the backward.
        comm_hook: How they are sent; see ``averaging``.

    Returns:
        The wrapped stage; ``stage`` itself where there is one replica, or nothing to average.
    """
    if mesh.dp_group is None or not any(p.requires_grad for p in stage.parameters()):
        return stage
    replicated = DistributedDataParallel(
        stage,
        process_group=mesh.dp_group,
        init_sync=False,  # weights are drawn by name: equal already
        **_NO_BUFFER_SYNC,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,
    )
    stage.register_forward_hook(_reach_parameters)
    if comm_hook != "none":
        replicated.register_comm_hook(averaging(mesh, comm_hook), _average_bucket)
    return replicated


def _reach_parameters(stage: nn.Module, given: tuple, output: Tensor | tuple[Tensor, ...]):
    """Make every parameter a part of what the stage returns: DDP waits for each of them in the backward.

    Those that the forward has not used get no gradient from there, which DDP takes for zero. It costs nothing, while
    ``find_unused_parameters`` searches the graph in every backward.
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
        return torch.ops.aten._unsafe_view(output, output.shape)  # torch detaches what is sent, which a view refuses

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, *([None] * ctx.parameters)


def _average_bucket(average: Average, bucket):  # DDP refuses an annotation in quotes
    return average(bucket.buffer())


def averaging(mesh: Mesh, comm_hook: str) -> Average:
    """Return the function that averages over the replicas of a mesh.

    Args:
        mesh: The grid of ranks, connected, with more than one replica.
        comm_hook: none: in the gradients' own dtype. bf16, fp16: in that dtype. hierarchical: within each group of
            replicas first, then between groups; hierarchical_bf16: likewise, in bf16 between groups.
    """
    dtype = _COMPRESSED.get(comm_hook)
    if comm_hook in HIERARCHICAL and mesh.inner_group is not None:
        return _Hierarchical(mesh, dtype)
    return partial(_average, mesh.dp_group, dtype)


def _average(group: dist.ProcessGroup, dtype: torch.dtype | None, gradients: Tensor) -> Future:
    """Divide, round to the smaller type if there is one, sum, and widen in place.

    torch's own hooks (``bf16_compress_hook``) do the same but check for NCCL.
    """
    gradients /= dist.get_world_size(group)
    small = gradients if dtype is None else gradients.to(dtype)
    sent = dist.all_reduce(small, group=group, async_op=True).get_future()

    def widen(done: Future) -> Tensor:
        (mean,) = done.value()  # raises what the sending has raised
        return mean if dtype is None else gradients.copy_(mean)

    return sent.then(widen)


class _Hierarchical:
    """Reduce-scatter in the group, all-reduce of one part between groups, all-gather in the group.

    Each rank sends 1/group of the bytes between groups. The three collectives of a bucket follow each other before the
    next bucket's begin: ranks must call those of a process group in one order. On a GPU they do so on a stream of their
    own: the backward does not wait for them.
    """

    def __init__(self, mesh: Mesh, across: torch.dtype | None) -> None:
        self._mesh, self._across = mesh, across
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, gradients: Tensor) -> Future:
        if not gradients.is_cuda:
            return self._averaged(gradients)
        if self._stream is None:
            self._stream = torch.cuda.Stream(gradients.device)
        self._stream.wait_stream(torch.cuda.current_stream(gradients.device))
        with torch.cuda.stream(self._stream):
            return self._averaged(gradients)  # whoever waits for the future waits for what is on this stream now

    def _averaged(self, gradients: Tensor) -> Future:
        mesh = self._mesh
        each = -(-gradients.numel() // mesh.group)
        whole = gradients.new_zeros(each * mesh.group)
        torch.div(gradients, mesh.dp, out=whole[: gradients.numel()])
        part = gradients.new_empty(each)
        dist.reduce_scatter_tensor(part, whole, group=mesh.inner_group)
        if mesh.outer_group is not None:
            sent = part if self._across is None else part.to(self._across)
            dist.all_reduce(sent, group=mesh.outer_group)
            part = sent.to(part.dtype)
        dist.all_gather_into_tensor(whole, part, group=mesh.inner_group)
        gradients.copy_(whole[: gradients.numel()])
        done = Future(devices=[gradients.device] if gradients.is_cuda else [])
        done.set_result(gradients)
        return done


class Buckets:
    """The gradients of one stage in flat tensors of about equal size, averaged when the stage is done with them.

    Its parameters' ``grad`` are views of the buckets from the first step on, as with DDP.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], average: Average, bucket_mb: float) -> None:
        """Refer to the parameters.

        Args:
            parameters: Of the stage.
            average: See ``averaging``.
            bucket_mb: The size of a bucket in MiB.
        """
        self._parameters = [p for p in parameters if p.requires_grad]
        self._average, self._bytes = average, bucket_mb * 2**20
        self._buckets: list[Tensor] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        self._pending: list[Future] = []

    @torch.no_grad()
    def start(self) -> None:
        """Start to average, while other stages compute. All replicas call it, for their stages in one order."""
        for parameter in self._parameters:
            if parameter.grad is None:  # not used here, but maybe by another replica
                parameter.grad = torch.zeros_like(parameter)
        self._fill([p for p in self._parameters if p.grad is not None and p.grad is not self._views.get(p)])
        self._pending = [self._average(bucket) for bucket in self._buckets]

    def wait(self) -> None:
        """Wait for what ``start`` has started."""
        for future in self._pending:
            future.wait()
        self._pending.clear()

    def _fill(self, parameters: list[nn.Parameter]) -> None:
        """Move gradients that are in no bucket into new ones."""
        while parameters:
            first, size = parameters[0], 0
            taken = []
            while parameters and (not taken or size < self._bytes) and parameters[0].dtype == first.dtype:
                taken.append(parameters.pop(0))
                size += taken[-1].grad.nbytes
            bucket = first.grad.new_empty(sum(p.numel() for p in taken))
            for parameter, flat in zip(taken, bucket.split([p.numel() for p in taken]), strict=True):
                view = flat.as_strided(parameter.shape, parameter.stride())  # fused kernels walk both side by side
                view.copy_(parameter.grad)
                parameter.grad = self._views[parameter] = view
            self._buckets.append(bucket)
