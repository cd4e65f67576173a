"""DistributedDataParallel around a stage, and what it sends."""

import inspect

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# torch 2.13 renamed the argument and warns at the old name.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}

_COMPRESSED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def replicate(stage: nn.Module, group: dist.ProcessGroup | None, bucket_mb: float, comm_hook: str) -> nn.Module:
    """``stage``, its gradients averaged over ``group`` where there is one and the stage has something to average.

    bucket_mb  gradients are sent in pieces of about this many MiB, while the backward goes on
    comm_hook  none | bf16 | fp16: the number format on the wire
    """
    if group is None or not any(p.requires_grad for p in stage.parameters()):
        return stage
    replicated = DistributedDataParallel(
        stage,
        process_group=group,
        init_sync=False,  # weights are drawn by name: equal already
        **_NO_BUFFER_SYNC,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,
    )
    if comm_hook in _COMPRESSED:
        replicated.register_comm_hook((group, _COMPRESSED[comm_hook]), _average_compressed)
    return replicated


def _average_compressed(state: tuple[dist.ProcessGroup, torch.dtype], bucket: dist.GradBucket):
    """Half as many bytes: the bucket is divided, rounded to the smaller type, summed, and widened in place.

    torch's own hooks (``bf16_compress_hook``) do the same but check for NCCL.
    """
    group, dtype = state
    gradients = bucket.buffer()
    small = (gradients / dist.get_world_size(group)).to(dtype)
    sent = dist.all_reduce(small, group=group, async_op=True).get_future()

    def widen(done: torch.futures.Future) -> Tensor:
        return gradients.copy_(done.value()[0])

    return sent.then(widen)
