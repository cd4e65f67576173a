"""Models that are broken in one way each, and what breaks them: layers a, b and c, of which b is the broken one."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.chain import Chain, LayerSpec
from models.losses import ClassCrossEntropy, Sums

_GENERATOR = np.random.default_rng(0)


def layer(name: str, forward: Callable) -> type[nn.Module]:
    """A module of that name whose ``forward(self, x)`` is a function."""
    return type(name, (nn.Module,), {"forward": forward, "__module__": __name__})


def cost(self, x):
    for _ in range(int(x.abs().sum()) % 3 + 1):
        x = x * 1.1
    return x


Numpy = layer("Numpy", lambda self, x: x + 0.1 * float(np.random.rand()))
BatchMean = layer("BatchMean", lambda self, x: x - x.mean(0))
MeanInEvaluation = layer("MeanInEvaluation", lambda self, x: x if self.training else x - x.mean(0))
Detach = layer("Detach", lambda self, x: x.detach() * 2)
MeanInBackward = layer("MeanInBackward", lambda self, x: x + x.mean(0) - x.mean(0).detach())
Imaginary = layer("Imaginary", lambda self, x: torch.complex(x, x - x.mean(0)))
Real = layer("Real", lambda self, x: x.real + x.imag)
PassesMask = layer("PassesMask", lambda self, x: (x - x.mean(0), torch.full_like(x, torch.finfo(x.dtype).min)))
DropsMask = layer("DropsMask", lambda self, x, mask: x)
Cost = layer("Cost", cost)


class Coin(nn.Module):
    """Leaves out what a coin decides, in training."""

    def __init__(self, coin: Callable[[], float]) -> None:
        super().__init__()
        self.coin = coin

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5 if self.training and self.coin() < 0.5 else x


class RoundsLargeBatches(nn.Module):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        return x.half().to(x.dtype) if len(x) > self.most else x


class LossRoundsLargeBatches(ClassCrossEntropy):
    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        sums = super().__call__(output, targets, weights)
        return Sums(sums.loss.half().double(), sums.count, sums.metrics) if len(output) > 4 else sums


class Gate(nn.Module):
    """Adds nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * x.mean(0)


class Counter(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Initial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(_GENERATOR.normal(size=8).tolist()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class AverageInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.average += x.detach().mean(0)
        return x


class AverageInTraining(AverageInEvaluation):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(x.detach().mean(0))
        return x - self.average


class Last(nn.Module):
    """Takes what comes in the dtype of its weights."""

    width = 3

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, self.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype))


class Float32(Last):
    width = 8

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.float())


class WeightsChanged(Last):
    width = 8

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.99)
        return self.linear(x)


class MeanOfSome:
    """A mean over the targets that are not padding, counted as one term for each sample."""

    metrics: tuple[str, ...] = ()

    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        total, some = F.cross_entropy(output, targets, ignore_index=1, reduction="sum"), (targets != 1).sum()
        return Sums(total / some.clamp(min=1) * len(targets), torch.tensor(len(targets), device=output.device))


SQUARE = partial(nn.Linear, 8, 8)


def chain_of(loss=None, tied=None, **layers: Callable[[], nn.Module]) -> Chain:
    specs = [LayerSpec(name, build) for name, build in {**layers, "c": Last}.items()]
    return Chain(specs, loss=loss or ClassCrossEntropy(), tied=tied or {})


def chain(b: Callable[[], nn.Module] = nn.Tanh, loss=None) -> Chain:
    return chain_of(loss, a=SQUARE, b=b)


def pair(b: Callable[[], nn.Module], d: Callable[[], nn.Module]) -> Chain:
    return chain_of(a=SQUARE, b=b, d=d)


def tied(b: Callable[[], nn.Module]) -> Chain:
    """The weights of a are those of d too, which is on another stage."""
    return chain_of(tied={"d.weight": "a.weight"}, a=SQUARE, b=b, d=SQUARE)


def shared() -> Chain:
    weight = nn.Parameter(torch.eye(8))

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    return chain_of(a=Shared, b=Shared)


DDP = ("parallel=ddp", "parallel.dp=2", "parallel.chunks=2")
PIPE = ("parallel=pipelined", "parallel.pp=2", "parallel.chunks=4", "parallel.schedule=1f1b")
WHOLE = ("verify.processes=1", "verify.steps=1")  # one process, all samples in one go among others
SMALLER = ("verify.processes=1",)  # one process with twice as many micro-batches


@dataclass(frozen=True)
class Broken:
    """A model, the probe that finds it, the layer that is named, a part of the reason, and a layout that is wrong.

    Without such a layout, all train alike what is not meant. Without a probe, only the layout shows it.
    """

    name: str
    chain: Callable[[], Chain]
    probe: str
    layer: str
    reason: str
    wrong: tuple[str, ...] = ()


ZOO = [
    Broken("numpy noise", partial(chain, Numpy), "repeats", "b", "draws from numpy's generator in training", DDP),
    Broken("a coin", partial(chain, partial(Coin, random.random)), "repeats", "b", "draws from Python's generator"),
    Broken("a hidden coin", partial(chain, partial(Coin, _GENERATOR.random)), "repeats", "b", "that are not torch's"),
    Broken("a counter", partial(chain, Counter), "repeats", "b", "keeps something between calls", DDP),
    Broken("the batch's mean", partial(chain, BatchMean), "halves", "b", "see each other in training", SMALLER),
    Broken("a gate of zero", partial(chain, Gate), "halves", "b", "see each other in training", SMALLER),
    Broken("in the backward", partial(chain, MeanInBackward), "halves", "b", "see each other in training", SMALLER),
    Broken("half above four", partial(chain, partial(RoundsLargeBatches, 4)), "sizes", "b", "in a batch of 8", WHOLE),
    Broken("loss above four", partial(chain, loss=LossRoundsLargeBatches()), "sizes", "c", "in a batch of 8"),
    Broken("in evaluation", partial(chain, MeanInEvaluation), "halves", "b", "see each other in evaluation", SMALLER),
    Broken("mean of some", partial(chain, loss=MeanOfSome()), "halves", "c", "MeanOfSome of a batch is not", SMALLER),
    # Whichever layer is built last overwrites the weights of the other, in every layout.
    Broken("tied silently", shared, "shared parameters", "b", "b.weight is a.weight"),
    Broken("initial numbers", partial(pair, Initial, Initial), "", "b", "", PIPE),
    Broken("detach", partial(chain, Detach), "outputs", "b", "returns nothing that has a gradient"),
    Broken("average in eval", partial(chain, AverageInEvaluation), "unchanged", "b", "'average' in evaluation", DDP),
    # Beside numbers that are much larger and equal, and in the imaginary part of what passes between layers.
    Broken("a mask passed", partial(pair, PassesMask, DropsMask), "halves", "b", "see each other in training"),
    Broken("imaginary", partial(pair, Imaginary, Real), "halves", "b", "see each other in training"),
    Broken("float32", partial(chain, Float32), "sizes", "b", "verify it with train.precision=fp32"),
    # No layout of several micro-batches takes these two: the error says what the forward changes.
    Broken("average", partial(chain, AverageInTraining), "unchanged", "b", "buffer 'average' in training"),
    Broken("weights changed", partial(chain, WeightsChanged), "unchanged", "b", "'linear.weight' in training"),
    # Pipelines refuse it: what passes between stages is not known before.
    Broken("cost by values", partial(chain, Cost), "shapes", "", "layer 'b' (Cost) reads numbers out of tensors"),
]


def planted(right: Callable, wrong: Callable) -> Any:
    """A patch of the program: ``wrong`` gets the function that it replaces before the arguments."""
    right = getattr(right, "replaced", right)  # planted before, in a process that is used again
    new = wraps(right)(lambda *args, **named: wrong(right, *args, **named))
    new.replaced = right
    return patch(f"{right.__module__}.{right.__qualname__}", new)


def elsewhere(right: Callable, wrong: Callable, model: Callable[..., Chain] = chain) -> Chain:
    """A sound model in a program that is wrong in processes which have others beside them."""

    def b() -> nn.Module:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            planted(right, wrong).start()
        return nn.Tanh()

    return model(b)
