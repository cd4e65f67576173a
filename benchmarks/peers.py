"""torchgpipe and fairscale's ``Pipe`` on this project's models: other libraries for pipelining, to compare with.

Both run in one process with one thread per device. The threads are keyed by device, so that all partitions on "cpu"
share one, and autograd runs a CPU's backward on the calling thread: on CPUs neither overlaps its partitions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn

from data.dataset import Batch
from models.batchnorm import BatchNorm2d
from models.chain import Chain
from parallel.devices import synchronize

NAMES = ("torchgpipe", "fairscale")
DEFAULT_CHECKPOINT = "except_last"  # of both


class Peer:
    """A model with the weights that this project gives it, trained by another library with plain SGD."""

    def __init__(
        self,
        name: str,
        chain: Chain,
        batch: Callable[[int], Batch],
        balance: Sequence[int],
        chunks: int,
        seed: int,
        lr: float,
        device_type: str = "cpu",
        checkpoint: str = DEFAULT_CHECKPOINT,
    ) -> None:
        """Build the pipeline.

        Args:
            name: One of ``NAMES``.
            chain: The model.
            batch: Returns the batch of a step's number.
            balance: The number of layers of each partition.
            chunks: The number of micro-batches.
            seed: The seed of the weights.
            lr: The learning rate.
            device_type: "cpu" or "cuda"; each partition has a GPU of its own.
            checkpoint: Which micro-batches recompute their activations; this project corresponds to "never".
        """
        devices = ["cpu" if device_type == "cpu" else f"cuda:{i}" for i in range(len(balance))]
        layers = as_sequential(chain, seed)
        self._pipe = _library(name)(layers, list(balance), devices=devices, chunks=chunks, checkpoint=checkpoint)
        self._optimizer = torch.optim.SGD(self._pipe.parameters(), lr=lr, fused=True)
        self._loss, self._batch = chain.loss, batch
        self._first, self._last = (torch.device(device) for device in (devices[0], devices[-1]))

    def step(self, number: int) -> float:
        """Run forward, backward and update; returns the mean loss."""
        batch = self._batch(number)
        output = self._pipe(batch.inputs.to(self._first))
        sums = self._loss(output, batch.targets.to(self._last), None)
        self._optimizer.zero_grad()
        (sums.loss / sums.count).backward()
        self._optimizer.step()
        for device in (self._first, self._last):
            synchronize(device)
        return (sums.loss / sums.count).item()

    def close(self) -> None:
        """End the library's threads. At the interpreter's exit, fairscale's ``__del__`` would wait for ever."""
        self._pipe = self._optimizer = None


def as_sequential(chain: Chain, seed: int) -> nn.Sequential:
    """Return the chain's layers with their initial weights, in the memory format that this project runs them in."""
    layers = chain.build(chain.names, seed, torch.device("cpu"))
    if chain.channels_last:
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
