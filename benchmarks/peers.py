"""torchgpipe and fairscale's ``Pipe`` on this project's models: other libraries for pipelining, to compare with.

Both run in one process with one thread per device. The threads are keyed by device, so that all partitions on "cpu"
share one, and autograd runs a CPU's backward on the calling thread: on CPUs neither overlaps its partitions.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.trainer import Trainer, same_model
from models.batchnorm import BatchNorm2d
from parallel.devices import synchronize

NAMES = ("torchgpipe", "fairscale")
DEFAULT_CHECKPOINT = "except_last"  # of both


class Peer:
    """A model with the weights that this project gives it, trained by another library with plain SGD."""

    def __init__(
        self, trainer: Trainer, name: str, balance: Sequence[int], chunks: int, checkpoint: str = DEFAULT_CHECKPOINT
    ) -> None:
        """Build the pipeline.

        Args:
            trainer: A single process, whose model, batches and learning rate these are.
            name: One of ``NAMES``.
            balance: The number of layers of each partition; on GPUs, each partition has one of its own.
            chunks: The number of micro-batches.
            checkpoint: Which micro-batches recompute their activations; this project corresponds to "never".
        """
        device = trainer.strategy.device.type
        self._devices = [torch.device(device, i if device == "cuda" else None) for i in range(len(balance))]
        layers = as_sequential(trainer)
        self._pipe = _library(name)(layers, list(balance), devices=self._devices, chunks=chunks, checkpoint=checkpoint)
        self._optimizer = torch.optim.SGD(self._pipe.parameters(), lr=trainer.optimizer.base_lr, fused=True)
        self._loss, self._batch = trainer.setup.chain.loss, trainer.batch

    def step(self, number: int) -> float:
        """Run forward, backward and update; returns the mean loss."""
        batch = self._batch(number)
        output = self._pipe(batch.inputs.to(self._devices[0]))
        sums = self._loss(output, batch.targets.to(self._devices[-1]), None)
        self._optimizer.zero_grad()
        (sums.loss / sums.count).backward()
        self._optimizer.step()
        for device in self._devices:
            synchronize(device)
        return (sums.loss / sums.count).item()

    def close(self) -> None:
        """End the library's threads. At the interpreter's exit, fairscale's ``__del__`` would wait for ever."""
        self._pipe = self._optimizer = None


def as_sequential(trainer: Trainer) -> nn.Sequential:
    """Return the trainer's model with its initial weights, in the memory format that this project runs it in."""
    layers = same_model(trainer)
    if trainer.setup.chain.channels_last:
        layers.to(memory_format=torch.channels_last)
    for module in layers.modules():
        if isinstance(module, BatchNorm2d):  # without the sums that only this project's strategies ask for
            module.__class__ = nn.BatchNorm2d
    return nn.Sequential(*(layer for _, layer in layers.items())).train()


def _library(name: str) -> type:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about deprecated parts of torch, at import
            if name == "torchgpipe":
                from torchgpipe import GPipe

                return GPipe
            from fairscale.nn.pipe import Pipe

            return Pipe
    except ImportError as error:
        hint = "python -m pip install --no-deps -r benchmarks/requirements.txt installs the libraries compared with"
        raise SystemExit(f"{error}; {hint}") from error
