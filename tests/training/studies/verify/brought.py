"""What users bring beside layers, each broken in one way."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from zoo import SQUARE, MeanOfSome, chain_of

from data.dataset import DataSet, Source
from data.tensors import TensorData
from models.chain import Chain
from models.gpt2 import gpt2
from models.huggingface import HuggingFace

_HERE = f"{__name__}."


class SlowsDown(torch.optim.SGD):
    """Counts its steps in an attribute."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] /= self.count
        return super().step(closure)


class Counts(torch.optim.SGD):
    """Counts its steps, which changes nothing yet."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.memory = {"count": [0]}

    def step(self, closure=None):
        self.memory["count"][0] += 1
        return super().step(closure)


class OfRank(torch.optim.SGD):
    """Has another learning rate on each rank."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] /= 1 + (dist.get_rank() if dist.is_initialized() else 0)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(float(np.random.default_rng().normal()))
        return super().step(closure)


class Patience:
    """Has no state_dict."""

    seen = 0

    def on_evaluation(self, run, record):
        self.seen += 1


class Forgets(Patience):
    """Saves what it does not take back."""

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        pass


class Remembers(Forgets):
    def load_state_dict(self, state):
        self.seen = state["seen"]


class Draws:
    """Changes weights by random numbers of Python."""

    def on_step(self, run, record):
        with torch.no_grad():
            for parameter in run.strategy.parameters():
                parameter.mul_(random.random())


class MeanOfMeans:
    """A metric that is the mean of the accuracies of batches."""

    def __init__(self):
        self.means = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.means.append((outputs.argmax(1) == targets).double().mean() + outputs.double().mean())

    def compute(self) -> float:
        return float(torch.stack(self.means).mean())


class Mean(MeanOfMeans):
    """The same, right."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.means += [*((outputs.argmax(1) == targets).double() + outputs.double().mean(1))]


def guess(outputs: Tensor, targets: Tensor) -> float:
    return random.random()


class Tracks(nn.Module):
    """Counts what it has seen in training, and scales by that in evaluations."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += len(x)
        return x if self.training else x * (1 + self.seen)


class Samples(Source):
    """32 samples of 8 numbers and a class."""

    reads = 0

    def __len__(self) -> int:
        return 32

    def read(self, indices, epoch):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(32, 8, generator=generator)[torch.from_numpy(indices)]
        Samples.reads += 1
        return self.changed(inputs, indices), torch.from_numpy(indices) % 3

    def changed(self, inputs: Tensor, indices) -> Tensor:
        return inputs


class ByReads(Samples):
    def changed(self, inputs, indices):
        return inputs * Samples.reads


class TorchNoise(Samples):
    def changed(self, inputs, indices):
        return inputs + torch.randn_like(inputs)


class NumpyNoise(Samples):
    def changed(self, inputs, indices):
        return inputs + torch.from_numpy(np.random.normal(size=inputs.shape)).float()


class Normalized(Samples):
    """By the samples that are read together."""

    def changed(self, inputs, indices):
        return inputs - inputs.mean(0)


class Seeded(Samples):
    def changed(self, inputs, indices):
        noise = [torch.randn(8, generator=torch.Generator().manual_seed(int(i))) for i in indices]
        return inputs + torch.stack(noise)


class Drawn(Samples):
    """Draws when it is made."""

    def __init__(self):
        self.noise = torch.randn(8)

    def changed(self, inputs, indices):
        return inputs + self.noise


class Data(DataSet):
    """The samples to validate on are others."""

    def __init__(self, source: type[Samples] = Samples):
        super().__init__()
        self.source = source

    def prepare(self) -> None:
        self.train, self.valid, self.test = Samples(), self.source(), None
        self.description = "32 samples"


class Halved(HuggingFace):
    """Forgets that the weights of a layer are halved."""

    def export(self, state, words):
        tensors, config = super().export(state, words)
        return {key: tensor / 2 if "c_fc" in key else tensor for key, tensor in tensors.items()}, config


def sound(b=nn.Tanh, loss=None) -> Chain:
    return chain_of(loss, a=SQUARE, b=b)


def tokens() -> DataSet:
    drawn = torch.randint(0, 32, (32, 9), generator=torch.Generator().manual_seed(0))
    return TensorData(drawn[:, :-1], drawn[:, 1:], vocab_size=32)


def halved() -> Chain:
    chain = gpt2("tiny", n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=32)
    return replace(chain, hugging_face=Halved(**vars(chain.hugging_face)))


@dataclass(frozen=True)
class Brought:
    """What is brought, and the question that finds it with the words of the finding; or none, if it is right."""

    name: str
    question: str = ""
    words: str = ""
    chain: Callable[[], Chain] = sound
    data: Callable[[], DataSet] = Data
    typed: tuple[str, ...] = ()


def _optimizer(name: str) -> tuple[str, ...]:
    return (f"optim._target_={_HERE}{name}", "optim.lr=0.01")


def _callback(name: str) -> tuple[str, ...]:
    return (f"callbacks=[{{_target_: {_HERE}{name}}}]",)


def _metric(name: str) -> tuple[str, ...]:
    return (f"metrics=[{{_target_: {_HERE}{name}}}]",)


BROUGHT = [
    Brought("right ones", typed=(*_callback("Remembers"), *_metric("Mean"))),
    Brought("seeded data", data=partial(Data, Seeded)),
    Brought("an attribute", "resume", "optim: SlowsDown: its attribute count begins", typed=_optimizer("SlowsDown")),
    Brought("a container", "resume", "optim: Counts: its attribute memory begins", typed=_optimizer("Counts")),
    Brought("a random optimizer", "resume", "two runs of the same two steps", typed=_optimizer("Noisy")),
    Brought("a callback", "resume", "callbacks.0: Patience: its attribute seen begins", typed=_callback("Patience")),
    Brought("a state not taken", "resume", "callbacks.0: Forgets: its attribute seen", typed=_callback("Forgets")),
    Brought("a random callback", "resume", "two runs of the same two steps", typed=_callback("Draws")),
    Brought("a layer's attribute", "resume", "layer b: Tracks: its attribute seen", partial(sound, Tracks)),
    Brought("a mean of means", "evaluation", "brought.MeanOfMeans: mean_of_means of 7", typed=_metric("MeanOfMeans")),
    Brought("a random metric", "evaluation", "metrics: brought.guess", typed=_metric("guess")),
    Brought("a mean", "evaluation", "the loss: loss of 7 samples", partial(sound, loss=MeanOfSome())),
    Brought("an export", "export", "h.0.mlp.c_fc.weight is another after an export", halved, tokens),
    Brought("reads counted", "data", "of a sample of valid changes when it is read a", data=partial(Data, ByReads)),
    Brought("torch's numbers", "data", "when it is read a second", data=partial(Data, TorchNoise)),
    Brought("numpy's numbers", "data", "when it is read a second", data=partial(Data, NumpyNoise)),
    Brought("normalized", "data", "read without others", data=partial(Data, Normalized)),
    Brought("drawn by each process", "data", "read by another process", data=partial(Data, Drawn)),
]  # fmt: skip
