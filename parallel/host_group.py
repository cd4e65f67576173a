"""A process group for ranks that share a GPU: gloo sends the tensors through main memory.

NCCL refuses two ranks on one device, also on slices of a device (MIG), and gloo itself does not send a GPU's tensors
from rank to rank. Here every operation copies its inputs to main memory, calls gloo on the copies, and copies the
result back. The copies wait for the device, so no operation overlaps with computation. This is slow, but it always
works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from parallel.devices import local_device

BACKEND, NCCL = "host", "nccl"


def init_process_group(device_type: str, rank: int, size: int, local_rank: int, store: Store, timeout_s: float) -> str:
    """Create the group of all ranks and return its backend. All ranks call this together."""
    backend, more = choose_backend(device_type, rank, size, local_rank, store)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, **more)
    return backend


def choose_backend(device_type: str, rank: int, size: int, local_rank: int, store: Store) -> tuple[str, dict[str, Any]]:
    """Return the backend for communication between ranks, and its arguments. Rank 0 prints which ranks share a GPU.

    All ranks call this together, before anything else uses ``store``.
    """
    if device_type != "cuda":
        return "gloo", {}
    device = local_device("cuda", local_rank)
    # A GPU's uuid is unique, unlike the index under which a process sees it. Slices of GPUs (MIG) count as one.
    gpu = torch.cuda.get_device_properties(device)
    store.set(f"gpu-{rank}", "MIG" if " MIG " in gpu.name else str(gpu.uuid))
    ranks_of: dict[bytes, list[str]] = {}
    for other in range(size):
        ranks_of.setdefault(store.get(f"gpu-{other}"), []).append(str(other))
    if len(ranks_of) == size:
        return NCCL, {"device_id": device}
    register()
    if rank == 0:
        named = ", ".join(" and ".join(ranks) for ranks in ranks_of.values() if len(ranks) > 1)
        print(f"ranks that share a GPU or use slices of it: {named}; tensors go through main memory", flush=True)
    return BACKEND, {}


def register() -> None:
    """Register ``HostGroup`` with torch, for ``init_process_group("host")`` and all groups created after it."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, HostGroup, devices=["cpu", "cuda"])


class HostGroup(dist.ProcessGroup):
    """A process group with the operations that strategies, DistributedDataParallel and torch's pipelines use.

    torch.distributed's functions call the methods by these names. ``options`` are the options of gloo.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]  # torch's stub knows only the other __init__
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        """Return the name in torch's registry."""
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # torch 2.13's own asks a backend, of which this group has none
        """Return the name by which FSDP's DeviceMesh finds the group."""
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo  # torch 2.11 reads from this backend whether operations can be coalesced

    def allreduce(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        """Reduce in place."""
        return self._run(self._gloo.allreduce, tensors, options)

    def allreduce_coalesced(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        """Reduce several tensors in place."""
        return self._run(self._gloo.allreduce_coalesced, tensors, options)

    def broadcast(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        """Send one rank's tensors to all."""
        return self._run(self._gloo.broadcast, tensors, options)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *options: Any) -> dist.Work:
        """Collect every rank's tensor in a list."""
        hosts = [list(map(_empty_host, gathered)) for gathered in outputs]
        work = self._gloo.allgather(hosts, list(map(_host, inputs)), *options)
        return _Work(work, sum(outputs, []), sum(hosts, []), outputs)

    def _allgather_base(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        host = _empty_host(output)
        return _Work(self._gloo._allgather_base(host, _host(input), *options), [output], [host], output)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        host = _empty_host(output)
        return _Work(self._gloo._reduce_scatter_base(host, _host(input), *options), [output], [host], output)

    def alltoall_base(
        self, output: Tensor, input: Tensor, received: list[int], sent: list[int], *options: Any
    ) -> dist.Work:
        """Send parts of the input to other ranks. ``received`` and ``sent`` have the number of rows for each rank."""
        host = _empty_host(output)
        work = self._gloo.alltoall_base(host, _host(input), received, sent, *options)
        return _Work(work, [output], [host], output)

    # torch 2.13's names of these three; its stub names the options
    all_to_all_single = alltoall_base  # pyright: ignore[reportAssignmentType]
    all_gather_single = _allgather_base  # pyright: ignore[reportAssignmentType]
    reduce_scatter_single = _reduce_scatter_base  # pyright: ignore[reportAssignmentType]

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Send a tensor."""
        hosts = list(map(_host, tensors))
        return _Work(self._gloo.send(hosts, rank, tag), [], hosts, tensors)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Receive a tensor."""
        hosts = list(map(_empty_host, tensors))
        return _Work(self._gloo.recv(hosts, rank, tag), tensors, hosts, tensors)

    def barrier(self, opts=None) -> dist.Work:
        """Wait for all ranks."""
        return self._gloo.barrier()

    def shutdown(self) -> None:
        """Close the connections."""
        del self._gloo

    def _run(self, operation: Callable, tensors: list[Tensor], options: tuple) -> dist.Work:
        hosts = list(map(_host, tensors))
        return _Work(operation(hosts, *options), tensors, hosts, tensors)


class _Work(dist.Work):
    """An operation in progress. ``wait`` copies the results to the device."""

    def __init__(self, work: dist.Work, tensors: Sequence[Tensor], hosts: Sequence[Tensor], result) -> None:
        super().__init__()
        self._work, self._result = work, result
        # This also keeps tensors alive until they are sent.
        self._tensors, self._hosts = list(tensors), list(hosts)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        with torch.no_grad():
            for tensor, host in zip(self._tensors, self._hosts, strict=False):
                if tensor is not host:
                    tensor.copy_(host)
        self._tensors, self._hosts = [], []
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future:
        """Return the future that DistributedDataParallel requests in the backward."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._result)
        return future


def _host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.contiguous() if tensor.device.type == "cpu" else _empty_host(tensor).copy_(tensor)


def _empty_host(tensor: Tensor) -> Tensor:
    """Return pinned memory of the tensor's shape. A GPU copies to and from pinned memory several times as fast."""
    return tensor if tensor.device.type == "cpu" else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
