"""torchgpipe and fairscale's ``Pipe`` on this project's models: what a user would otherwise take for pipelining.

Both run in one process, a thread a device. They key these threads by device, so that all partitions on "cpu" share
one, and autograd runs a CPU's backward on the thread that asked for it: on CPUs neither overlaps its partitions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.trainer import wait_for
from data.batch import Batch
from models.batchnorm import BatchNorm2d
from models.chain import Chain

NAMES = ("torchgpipe", "fairscale")
DEFAULT_CHECKPOINT = "except_last"  # of both


class Peer:
    """``chain`` with the weights that this project draws for it, under one of ``NAMES``; plain SGD.

    balance     layers of each partition
    checkpoint  which micro-batches recompute their activations: "never" is what this project does
    """

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
        devices = ["cpu" if device_type == "cpu" else f"cuda:{i}" for i in range(len(balance))]
        self._pipe = _class(name)(
            as_sequential(chain, seed), list(balance), devices=devices, chunks=chunks, checkpoint=checkpoint
        )
        self._optimizer = torch.optim.SGD(self._pipe.parameters(), lr=lr, fused=True)
        self._loss, self._batch = chain.loss, batch
        self._first, self._last = (torch.device(device) for device in (devices[0], devices[-1]))

    def step(self, number: int) -> float:
        """Forward, backward and update; returns the mean loss."""
        batch = self._batch(number)
        output = self._pipe(batch.inputs.to(self._first))
        sums = self._loss(output, batch.targets.to(self._last), None)
        self._optimizer.zero_grad()
        (sums.loss / sums.count).backward()
        self._optimizer.step()
        for device in (self._first, self._last):
            wait_for(device)
        return (sums.loss / sums.count).item()

    def close(self) -> None:
        # fairscale ends its threads in __del__, which at the interpreter's exit waits for ever: they are gone by then.
        self._pipe = self._optimizer = None


def as_sequential(chain: Chain, seed: int) -> nn.Sequential:
    """The chain's layers with their initial weights, in the memory format that this project runs them in."""
    layers = chain.build(chain.names, seed, torch.device("cpu"))
    if chain.channels_last:
        layers.to(memory_format=torch.channels_last)
    for module in layers.modules():
        if isinstance(module, BatchNorm2d):  # without the sums that only this project's strategies ask for
            module.__class__ = nn.BatchNorm2d
    return nn.Sequential(*(layer for _, layer in layers.items())).train()


def _class(name: str) -> type:
    """Raises SystemExit where the library is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecated parts of torch, at import
            if name == "torchgpipe":
                from torchgpipe import GPipe

                return GPipe
            from fairscale.nn.pipe import Pipe

            return Pipe
    except ImportError as error:
        raise SystemExit(
            f"{error}; python -m pip install --no-deps -r benchmarks/requirements.txt brings the peers"
        ) from error
