"""Several devices in one process: stages that compute one after the other, or copies of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from common.errors import PlanError
from data.dataset import mapped
from models.chain import Tensors, as_tuple
from parallel.devices import autocast
from parallel.stage import Stage
from parallel.strategy import LocalStrategy


class ModelParallel(LocalStrategy):
    """Several stages, one per device, that compute one after the other: ``model_parallel``."""

    def wrap(self) -> nn.Module:
        """Chain the stages."""
        return _OnSeveralDevices(self.stages)


class _OnSeveralDevices(nn.Module):
    """Stages in order. Tensors are moved to each stage's device.

    The devices must be of one type, because a copy from a GPU to the CPU is read before it ends if nothing waits for
    it.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        self._stages = tuple(stages)  # not as submodules: the strategy has their parameters

    def forward(self, *tensors: Tensor, samples: Sequence[int], targets: Tensors, **others: Tensor) -> Tensors:
        output: Tensors = tensors
        for stage in self._stages:
            if stage.ends_chain:
                targets = mapped(lambda x, at=stage.device: x.to(at, non_blocking=True), targets)
            others = {name: x if name == "weights" else x.to(stage.device) for name, x in others.items()}
            # Copy on the same device, too: the stage may change the tensor in place, and the previous stage would not
            # notice.
            tensors = tuple(tensor.to(stage.device, non_blocking=True, copy=True) for tensor in as_tuple(output))
            output = stage(*tensors, samples=samples, targets=targets, **others)
        return output


class DataParallel(LocalStrategy):
    """torch's ``nn.DataParallel``, as a baseline for ``ddp``: ``data_parallel``.

    Every forward copies the model to all devices. Each device computes a part of the micro-batch, with separate
    BatchNorm.
    """

    def wrap(self) -> nn.Module:
        """Copy the stage to all devices."""
        if self.options.compile:
            raise PlanError(
                "train.compile=true keeps the model on one GPU, but parallel=data_parallel copies it to all GPUs in "
                "every forward; use parallel=ddp, or train.compile=false"
            )
        devices = [torch.device(name).index for name in self.plan.devices]
        return _OnCopies(_Copy(self.stages[0], devices, self.plan.precision), devices)


class _OnCopies(nn.DataParallel):
    def forward(self, *tensors: Tensor, samples: Sequence[int], targets: Tensors, **others: Tensor) -> Tensor:
        device = as_tuple(targets)[0].device
        others = {name: x.to(device) for name, x in others.items()}  # which DataParallel scatters
        return super().forward(*tensors, samples=tuple(samples), targets=targets, **others).sum()


class _Copy(nn.Module):
    """The module that runs on each device, in a separate thread. A thread does not inherit autocast."""

    def __init__(self, stage: Stage, devices: Sequence[int], precision: str) -> None:
        super().__init__()
        self._stage, self._devices, self._precision = stage, devices, precision

    def forward(self, *tensors: Tensor, samples: tuple[int, int], targets: Tensors, **others: Tensor) -> Tensor:
        first, count = samples
        each = -(-count // len(self._devices))  # all parts but the last
        one, *_ = as_tuple(targets)
        part = first + each * self._devices.index(one.device.index), len(one)
        with autocast(self._precision, "cuda"):
            return self._stage(*tensors, samples=part, targets=targets, **others)
