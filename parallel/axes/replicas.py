"""The data-parallel axis: each replica computes different samples, and gradients are averaged in the backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from common.errors import PlanError
from models.chain import Chain
from parallel.axes.axis import Apart, Axis, all_reduce_sum, copy_back
from parallel.layout import Layout
from parallel.mesh import COPIES, EXPERTS, PEERS, Mesh, reduce_scatter
from parallel.plan import Plan
from parallel.strategies import StrategyInfo, suggest

# A function that averages a flat tensor over the replicas in place. Its future is done when the tensor holds the mean.
Average = Callable[[Tensor], Future]

# torch 2.13 renamed the argument and warns about the old name.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}

# The dtype in which gradients are sent; in a hierarchy, the dtype between groups.
_COMPRESSED = {"bf16": torch.bfloat16, "fp16": torch.float16, "hierarchical_bf16": torch.bfloat16}
HIERARCHICAL = ("hierarchical", "hierarchical_bf16")  # values of parallel.comm_hook


class Replicas(Axis):
    """Splits the batch. Ranks that hold the same parameters average their gradients."""

    mesh_axes = (COPIES, PEERS, EXPERTS)

    @classmethod
    def check_keys(cls, section: Any, info: StrategyInfo) -> None:
        """See ``Axis.check_keys``."""
        if not info.replicas and section.dp not in (None, 1):
            other = suggest(replicas=True, stages=info.stages)
            raise PlanError(f"parallel={section.name} has one replica; parallel.dp={section.dp} needs parallel={other}")

    @classmethod
    def allows(cls, info: StrategyInfo, layout: Layout) -> bool:
        """See ``Axis.allows``."""
        return info.replicas == (layout.dp > 1)

    def __init__(self, name: str, plan: Plan, chain: Chain, mesh: Mesh) -> None:
        """See ``Axis``."""
        super().__init__(name, plan, chain, mesh)
        # bf16 and fp16 send all gradients in that dtype; hierarchical_bf16 sends gradients in bf16 only between groups.
        dtype = _COMPRESSED.get(plan.comm_hook)
        in_groups = plan.comm_hook in HIERARCHICAL and mesh.axis(PEERS, EXPERTS).size > 1
        average = self._average_in_groups if in_groups else partial(_average, mesh.dp_group)
        self._average: Average = partial(average, dtype)
        self._stream: torch.cuda.Stream | None = None
        self._buckets: dict[nn.Module, list[list[nn.Parameter]]] = {}  # for a split backward
        self._pending: list[tuple[Future, Tensor, list[Tensor]]] = []
        self._apart: dict[nn.Parameter, Sequence[str]] = {}

    def wrap(self, stage: nn.Module, apart: Apart) -> nn.Module:
        """Wrap a stage in DDP, unless parameters are sharded, the backward is split, or nothing is trained.

        Gradients are averaged in flat tensors of about ``plan.bucket_mb`` MiB, during the backward. If the backward is
        split, they are averaged after the stage's last backward.
        """
        plan, trained = self.plan, [p for p in stage.parameters() if p.requires_grad and p not in apart]
        self._apart |= apart
        if plan.shards > 1 or not trained:
            return stage
        if plan.splits_backward:
            buckets, room = self._buckets.setdefault(stage, []), 0.0
            for parameter in trained:
                if room <= 0:
                    buckets.append([])
                    room = plan.bucket_mb * 2**20
                buckets[-1].append(parameter)
                room -= parameter.nbytes
            return stage
        if apart:
            ignored = [name for name, parameter in stage.named_parameters() if parameter in apart]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, ignored)
        replicated = DistributedDataParallel(
            stage,
            process_group=self.mesh.dp_group,
            init_sync=False,  # weights are initialized by name or loaded, so they are equal; the run checks it
            **_NO_BUFFER_SYNC,
            gradient_as_bucket_view=True,
            bucket_cap_mb=plan.bucket_mb,
        )
        stage.register_forward_hook(_reach_parameters)
        if plan.comm_hook != "none":
            replicated.register_comm_hook(self._average, _average_bucket)
        return replicated

    @torch.no_grad()
    def start_reducing(self, module: nn.Module) -> None:
        """See ``Axis.start_reducing``. All replicas call this for their stages in the same order."""
        for bucket in self._buckets.get(module, ()):
            gradients = []
            for parameter in bucket:
                if parameter.grad is None:  # not used by this replica, but maybe by another replica
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self._pending.append((self._average(flat), flat, gradients))

    def finish_gradients(self, names: Mapping[nn.Parameter, Sequence[str]]) -> None:
        """See ``Axis.finish_gradients``."""
        for future, flat, gradients in self._pending:
            future.wait()
            copy_back(flat, gradients)
        self._pending.clear()
        for over in dict.fromkeys(map(tuple, self._apart.values())):
            gradients = [p.grad for p, axes in self._apart.items() if tuple(axes) == over and p.grad is not None]
            for gradient in gradients:
                gradient /= self.mesh.dp
            for ranks in (self.mesh.axis(axis) for axis in over):
                if ranks.size > 1:
                    all_reduce_sum(gradients, ranks.group)

    def _average_in_groups(self, across: torch.dtype | None, gradients: Tensor) -> Future:
        """Reduce-scatter among peers, all-reduce one part between their groups, all-gather among peers.

        Each rank sends 1/peers of the bytes between groups, in the dtype ``across`` if it is given. The three
        collectives of a bucket are called before the collectives of the next bucket, since all ranks must call the
        collectives of a process group in the same order. On a GPU the collectives run on a separate stream, so that the
        backward does not wait for them.
        """
        peers, copies, stream = self.mesh.axis(PEERS, EXPERTS), self.mesh.axis(COPIES), nullcontext()
        if gradients.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(gradients.device)
            self._stream.wait_stream(torch.cuda.current_stream(gradients.device))
            stream = torch.cuda.stream(self._stream)  # waiting for the future waits for the work queued on it
        with stream:
            each = -(-gradients.numel() // peers.size)
            whole = gradients.new_zeros(each * peers.size)
            torch.div(gradients, self.mesh.dp, out=whole[: gradients.numel()])
            part = gradients.new_empty(each)
            reduce_scatter(part, whole, group=peers.group)
            if copies.group is not None:
                sent = part if across is None else part.to(across)
                dist.all_reduce(sent, group=copies.group)
                part = sent.to(part.dtype)
            dist.all_gather_into_tensor(whole, part, group=peers.group)
            gradients.copy_(whole[: gradients.numel()])
            done = Future(devices=[gradients.device] if gradients.is_cuda else [])
            done.set_result(gradients)
            return done


def _reach_parameters(stage: nn.Module, given: tuple, output: Tensor | tuple[Tensor, ...]):
    """Make the stage's output depend on every parameter, because DDP waits for each parameter in the backward.

    Parameters that the forward has not used thus get no gradient, which DDP treats as zero. This costs nothing, while
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
        return torch.ops.aten._unsafe_view(output, output.shape)  # not a view: torch detaches the output in place

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, *([None] * ctx.parameters)


def _average_bucket(average: Average, bucket):  # DDP refuses an annotation in quotes
    return average(bucket.buffer())


def _average(group: dist.ProcessGroup | None, dtype: torch.dtype | None, gradients: Tensor) -> Future:
    """Divide the gradients, convert them to ``dtype`` if it is given, sum over the group, and convert back in place.

    torch's own hooks (``bf16_compress_hook``) do the same, but check for NCCL.
    """
    gradients /= dist.get_world_size(group)
    small = gradients if dtype is None else gradients.to(dtype)
    work = dist.all_reduce(small, group=group, async_op=True)
    sent = work.get_future()  # pyright: ignore[reportOptionalMemberAccess]  # None only without async_op

    def widen(done: Future) -> Tensor:
        (mean,) = done.value()  # raises the error of the all-reduce
        return mean if dtype is None else gradients.copy_(mean)

    return sent.then(widen)
