"""All stages in this process: ``single``, ``model_parallel`` (stages on several devices), ``ddp`` (one per rank) and
``data_parallel`` (torch's own, as a baseline).

Micro-batches run one after the other and their gradients add up: gradient accumulation, under the name that
pipelines give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from data.batch import Batch
from parallel.stage import Stage
from parallel.strategy import Strategy


class LocalStrategy(Strategy):
    """``single``: one stage; ``model_parallel``: several, one device after the other; ``ddp``: one, replicated."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.plan.strategy == "data_parallel":
            self._modules = [_Scattered(self.stages[0], self.plan.devices)]
        else:
            self._modules = [self._replicate(stage) for stage in self.stages]

    def _forward_backward(self, batch: Batch) -> None:
        chunks = batch.chunks(self.plan.chunks)
        for index, chunk in zip(self._microbatch_indices(), chunks, strict=True):
            with ExitStack() as accumulating:
                if chunk is not chunks[-1]:
                    for module in self._modules:
                        if hasattr(module, "no_sync"):
                            accumulating.enter_context(module.no_sync())
                self._run(index, chunk).backward()

    def _forward(self, batch: Batch) -> None:
        for index, chunk in zip(self._microbatch_indices(), batch.chunks(self.plan.chunks), strict=True):
            self._run(index, chunk)

    def _run(self, index: Tensor, chunk: Batch) -> Tensor:
        x = chunk.inputs
        for stage, module in zip(self.stages, self._modules, strict=True):
            last = chunk.to(stage.device, non_blocking=True) if stage.ends_chain else None
            x = module(
                x.to(stage.device, non_blocking=True),
                microbatch=index,
                targets=last.targets if last else None,
                weights=last.weights if last else None,
            )
        return x

    def close(self) -> None:
        self._modules.clear()
        super().close()


class _Scattered(nn.Module):
    """``nn.DataParallel`` around a stage: each device takes a part of the micro-batch, with dropout and BatchNorm of
    its own, and the summed losses add up."""

    def __init__(self, stage: Stage, devices: Sequence[str]) -> None:
        super().__init__()
        self._copies = nn.DataParallel(stage, [torch.device(d).index for d in devices])

    def forward(self, x: Tensor, microbatch: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        # One index a device: arguments are cut along their first dimension, as the inputs are.
        indices = microbatch.expand(len(x))
        return self._copies(x, microbatch=indices, targets=targets, weights=weights).sum()
