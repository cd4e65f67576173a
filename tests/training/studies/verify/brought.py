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


class Changed(torch.optim.SGD):
    """Changes its groups before each step."""

    def step(self, closure=None):
        for group in self.param_groups:
            self.change(group)
        return super().step(closure)


class SlowsDown(Changed):
    """Counts its steps in an attribute."""

    count = 0

    def change(self, group):
        self.count += 1
        group["lr"] /= self.count


class Counts(Changed):
    """Counts its steps in a container, which changes nothing yet."""

    def change(self, group):
        self.__dict__.setdefault("memory", {"count": []})["count"].append(1)


class OfRank(Changed):
    """Has another learning rate on each rank."""

    def change(self, group):
        group["lr"] /= 1 + (dist.get_rank() if dist.is_initialized() else 0)


class Noisy(Changed):
    def change(self, group):
        for parameter in group["params"]:
            parameter.grad.add_(float(np.random.default_rng().normal()))


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


class Mean:
    """A metric that is the mean over samples."""

    def __init__(self):
        self.batches = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.batches.append((outputs.argmax(1) == targets).double() + outputs.double().mean(1))

    def compute(self) -> float:
        return float(torch.cat(self.batches).mean())


class MeanOfMeans(Mean):
    def compute(self) -> float:
        return float(torch.stack([batch.mean() for batch in self.batches]).mean())


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
    """32 samples of 8 numbers and a class; ``change`` gets the source, and the numbers and indices that are read."""

    def __init__(self, change: Callable[..., Tensor]) -> None:
        self.change, self.reads, self.drawn = change, 0, torch.randn(8)

    def __len__(self) -> int:
        return 32

    def read(self, indices, epoch):
        self.reads += 1
        numbers = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))[torch.from_numpy(indices)]
        return self.change(self, numbers, indices), torch.from_numpy(indices) % 3


class Data(DataSet):
    """The samples to validate on are changed."""

    def __init__(self, change: Callable[..., Tensor] = lambda source, x, indices: x) -> None:
        super().__init__()
        self.change = change

    def prepare(self) -> None:
        self.train, self.valid, self.test = Samples(lambda source, x, indices: x), Samples(self.change), None
        self.description = "32 samples"


def seeded(source: Samples, x: Tensor, indices: np.ndarray) -> Tensor:
    return x + torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(int(i))) for i in indices])


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
    Brought("seeded data", data=partial(Data, seeded)),
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
    *(Brought(name, "data", words, data=partial(Data, change)) for name, words, change in [
        ("reads counted", "of a sample of valid changes when it is read a", lambda source, x, _: x * source.reads),
        ("torch's numbers", "when it is read a second", lambda source, x, _: x + torch.randn_like(x)),
        ("numpy's numbers", "when it is read a second", lambda source, x, _: x + np.random.normal()),
        ("normalized", "read without others", lambda source, x, _: x - x.mean(0)),
        ("drawn by each process", "read by another process", lambda source, x, _: x + source.drawn),
    ]),
]  # fmt: skip
