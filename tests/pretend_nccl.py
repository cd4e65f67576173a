"""A process group like NCCL's for pretend GPUs (``pretend_cuda``): its operations do not make the host wait."""

import contextlib
import sys

import torch.distributed as dist

from parallel.host_group import HostGroup


def register() -> str:
    """A backend like NCCL, whose operations do not make the host wait. Returns its name for init_process_group."""

    class Uncounted(dist.Work):
        def __init__(self, work) -> None:
            super().__init__()
            self._work = work

        def wait(self, *timeout) -> bool:
            with _not_counted():
                return self._work.wait()

        def get_future(self):
            with _not_counted():
                return self._work.get_future()

    class PretendNccl(HostGroup):
        pass

    def uncounted(method):
        def call(self, *args):
            with _not_counted():
                return Uncounted(method(self, *args))

        return call

    for name, method in vars(HostGroup).items():
        if name in ("allreduce", "broadcast", "allgather", "send", "recv") or name.endswith(("_base", "_single")):
            setattr(PretendNccl, name, uncounted(method))

    dist.Backend.register_backend("pretend_nccl", PretendNccl, devices=["cpu", "cuda"])
    return "pretend_nccl"


@contextlib.contextmanager
def _not_counted():
    backend = sys.modules["pretend_cuda_backend"]
    backend.pretend_count(0)
    try:
        yield
    finally:
        backend.pretend_count(1)
