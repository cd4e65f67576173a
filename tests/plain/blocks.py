"""What random programs are built of: layers of eight features, and losses with their targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.nn.utils import parametrizations as of_torch
from torch.utils.checkpoint import checkpoint

from models.losses import Sums

WIDTH, LENGTH, SIDE, CLASSES, TOKENS = 8, 5, 4, 3, 11
INPUTS = {"rows": (6,), "sequences": (LENGTH, 6), "tokens": (LENGTH,), "images": (3, SIDE, SIDE)}
linear = partial(nn.Linear, WIDTH, WIDTH)
conv = partial(nn.Conv2d, WIDTH, WIDTH, 3, padding=1)
attention = partial(nn.MultiheadAttention, WIDTH, 2, batch_first=True)
encoder = partial(nn.TransformerEncoderLayer, WIDTH, 2, 12, 0.0, batch_first=True)


class Own(nn.Module):
    """A block of these parts, whose forward is a function of it and its inputs."""

    def __init__(self, function: Callable, **parts) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *x):
        return self.function(self, *x)


class Moving(nn.Module):
    """Subtracts a mean that follows the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().flatten(0, -2).mean(dim=0).to(self.mean.dtype), 0.1)
        return x - self.mean


def norm(kind=nn.BatchNorm1d) -> nn.Module:
    """With running statistics that are those of no batch."""
    layer = kind(WIDTH)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2.0)
    return layer


def tied(first: nn.Linear, second: nn.Linear) -> nn.Module:
    second.weight = first.weight
    return Own(lambda m, x: m.b(m.a(x).tanh()), a=first, b=second)


# Of [b, 8] (r), of [b, 5, 8] (s), of [b, 8, 4, 4] (i).
BLOCKS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    # torch's layers as they are
    "Tanh": ("rsi", nn.Tanh), "GELU": ("rsi", nn.GELU), "Softplus": ("rsi", nn.Softplus), "PReLU": ("rsi", nn.PReLU),
    "Hardswish": ("rsi", nn.Hardswish), "ReLU in place": ("rsi", lambda: nn.ReLU(inplace=True)),
    "Dropout of 0": ("rsi", lambda: nn.Dropout(0.0)), "Linear": ("rs", linear),
    "LayerNorm": ("rs", lambda: nn.LayerNorm(8)),
    "without bias": ("rs", lambda: linear(bias=False)), "RMSNorm": ("rs", lambda: nn.RMSNorm(WIDTH)),
    "weight_norm": ("rs", lambda: of_torch.weight_norm(linear())), "Moving": ("rs", Moving),
    "orthogonal": ("rs", lambda: of_torch.orthogonal(linear())), "encoder": ("s", encoder),
    "spectral_norm": ("rs", lambda: of_torch.spectral_norm(linear())), "BatchNorm1d": ("r", norm),
    "BatchNorm1d slow": ("r", lambda: nn.BatchNorm1d(WIDTH, momentum=0.01, eps=1e-2)),
    "GroupNorm": ("ri", lambda: nn.GroupNorm(2, WIDTH)), "norm first": ("s", lambda: encoder(norm_first=True)),
    "Conv2d": ("i", conv), "depthwise": ("i", lambda: conv(groups=WIDTH, bias=False)),
    "circular": ("i", lambda: conv(padding_mode="circular")), "BatchNorm2d": ("i", lambda: norm(nn.BatchNorm2d)),
    "ConvTranspose2d": ("i", lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 3, padding=1)),
    "shuffle": ("i", lambda: nn.ChannelShuffle(2)),
    "InstanceNorm2d": ("i", lambda: nn.InstanceNorm2d(WIDTH, affine=True)),
    "MaxPool2d": ("i", lambda: nn.MaxPool2d(3, 1, 1)),
    "weight_norm of a convolution": ("i", lambda: of_torch.weight_norm(conv())),
    # residual, in place, called twice, tied
    "residual": ("rs", lambda: Own(lambda m, x: x + m.a(m.n(x)).relu(), a=linear(), n=nn.LayerNorm(WIDTH))),
    "begins in place": ("rs", lambda: Own(lambda m, x: x + m.a(F.relu(x, inplace=True)), a=linear())),
    "adds in place": ("rs", lambda: Own(lambda m, x: m.a(x).add_(x), a=linear())),
    "called twice": ("rs", lambda: Own(lambda m, x: m.a(m.a(x).tanh()), a=linear())),
    "tied pair": ("rs", lambda: tied(linear(), linear())),
    "transposed": ("rs", lambda: Own(lambda m, x: F.linear(m.a(x).sigmoid(), m.a.weight.T), a=linear())),
    "ends in place": ("i", lambda: Own(lambda m, x: F.relu(x + m.n(m.a(x)), True), a=conv(), n=norm(nn.BatchNorm2d))),
    # parts that are frozen, in eval mode, not used, used by some samples, without gradients
    "half frozen": ("rs", lambda: Own(lambda m, x: m.b(m.a(x).tanh()), a=linear().requires_grad_(False), b=linear())),
    "frozen norm": ("r", lambda: Own(lambda m, x: m.a(x), a=norm().requires_grad_(False).eval())),
    "unused": ("rs", lambda: Own(lambda m, x: m.a(x), a=linear(), b=linear())),
    "unused norm": ("r", lambda: Own(lambda m, x: m.a(x), a=linear(), b=nn.BatchNorm1d(WIDTH))),
    "rarely": ("rs", lambda: Own(lambda m, x: x + m.a(x) * (x > 2) if bool((x > 2).any()) else x, a=linear())),
    "either": ("rs", lambda: Own(lambda m, x: torch.where(x > 0, m.a(x), m.b(x)), a=linear(), b=linear())),
    "detached": ("rs", lambda: Own(lambda m, x: m.a(x) * m.b(x.detach()).sigmoid(), a=linear(), b=linear())),
    "no_grad": ("rs", lambda: Own(lambda m, x: m.a(x) + torch.no_grad()(m.b)(x), a=linear(), b=linear())),
    "norm twice": ("r", lambda: Own(lambda m, x: m.a(m.a(x) * 2), a=nn.BatchNorm1d(WIDTH))),
    # other ways to hold and to use parameters
    "scale": ("rs", lambda: Own(lambda m, x: x * m.a, a=nn.Parameter(torch.ones(WIDTH)))),
    "number": ("rsi", lambda: Own(lambda m, x: x * m.a, a=nn.Parameter(torch.tensor(0.7)))),
    "a list": ("rs", lambda: Own(lambda m, x: x @ m.a[0] @ m.a[1], a=nn.ParameterList([*torch.randn(2, 8, 8) / 3]))),
    "a dict": ("rs", lambda: Own(lambda m, x: m.a["p_1"](x).sin(), a=nn.ModuleDict({"p_1": linear()}))),
    "checkpoint": ("rs", lambda: Own(lambda m, x: checkpoint(m.a, x, use_reentrant=False).tanh(), a=linear())),
    "gradient": ("rs", lambda: Own(lambda m, x: x + grad(lambda z: m.a(z).tanh().sum())(x), a=linear())),
    "mixture": ("rs", lambda: Own(lambda m, x: m.g(x) * m.a(x) + m.b(x), g=nn.Linear(8, 1), a=linear(), b=linear())),
    "Fourier": ("rs", lambda: Own(lambda m, x: m.a(torch.fft.fft(x).abs()), a=linear())),
    "gathered": ("rs", lambda: Own(lambda m, x: m.a(x).gather(-1, x.argsort(dim=-1)), a=linear())),
    "GRUCell": ("rs", lambda: Own(lambda m, x: m.a(x.flatten(0, -2)).view(x.shape), a=nn.GRUCell(WIDTH, WIDTH))),
    "Bilinear": ("rs", lambda: Own(lambda m, x: m.a(x, x.contiguous()), a=nn.Bilinear(WIDTH, WIDTH, WIDTH))),
    # of sequences and of images
    "GRU": ("s", lambda: Own(lambda m, x: m.a(x)[0], a=nn.GRU(WIDTH, WIDTH, batch_first=True))),
    "LSTM": ("s", lambda: Own(lambda m, x: m.a(x)[0], a=nn.LSTM(WIDTH, 4, bidirectional=True, batch_first=True))),
    "RNN": ("s", lambda: Own(lambda m, x: x + m.a(x)[0], a=nn.RNN(WIDTH, WIDTH, 2, batch_first=True))),
    "projected": ("s", lambda: Own(lambda m, x: m.a(x)[0], a=nn.LSTM(WIDTH, 12, proj_size=WIDTH, batch_first=True))),
    "attention": ("s", lambda: Own(lambda m, x: x + m.a(x, x, x)[0], a=attention())),
    "bias_kv": ("s", lambda: Own(lambda m, x: m.a(x, x, x)[0], a=attention(add_bias_kv=True))),
    "causal": ("s", lambda: Own(lambda m, x: x + attend(*m.a(x).chunk(3, -1), is_causal=True), a=nn.Linear(8, 24))),
    "Conv1d": ("s", lambda: Own(lambda m, x: m.a(x.mT).mT, a=nn.Conv1d(WIDTH, WIDTH, 3, padding=1))),
    "norm of channels": ("s", lambda: Own(lambda m, x: m.a(x.mT).mT, a=norm())),
    "positions": ("s", lambda: Own(lambda m, x: x + m.a(torch.arange(x.shape[1])), a=nn.Embedding(LENGTH, WIDTH))),
    "rolled": ("s", lambda: Own(lambda m, x: m.a(x.cumsum(dim=1) / 3) + x.roll(1, dims=1), a=linear())),
    "squeezed": ("i", lambda: Own(lambda m, x: x * m.a(x.mean(dim=(2, 3))).sigmoid()[..., None, None], a=linear())),
    "pixels": ("i", lambda: Own(lambda m, x: m.a(*[x.flatten(2).mT] * 3)[0].mT.unflatten(2, (4, 4)), a=attention())),
    "channels last": ("i", lambda: Own(lambda m, x: m.a(x.contiguous(memory_format=torch.channels_last)), a=conv())),
    "resized": ("i", lambda: Own(lambda m, x: F.avg_pool2d(m.a(F.interpolate(x, scale_factor=2)), 2), a=conv())),
}  # fmt: skip


def whole(m, *x):
    """The layers one after the other, by a forward of their own."""
    for layer in m._modules.values():  # children() has a layer that is there twice once
        x = layer(*x)
        x = x if isinstance(x, tuple) else (x,)
    return x if len(x) > 1 else x[0]


def begins(m, *x):
    x = m.a(*x)
    return x, x.tanh()


def stem(domain: str, second: bool) -> nn.Module:
    """One or two inputs -> [b, ..., WIDTH], of images [b, WIDTH, ...]; the second one, [b, 2], is added everywhere."""
    kinds = {"tokens": lambda: nn.Embedding(TOKENS, WIDTH, padding_idx=0), "images": lambda: nn.Conv2d(3, WIDTH, 1)}
    first = kinds.get(domain, lambda: nn.Linear(6, WIDTH))()
    if not second:
        return Own(lambda m, x: m.a(x), a=first)
    places = {"rows": (...,), "images": (..., None, None)}.get(domain, (slice(None), None))
    return Own(lambda m, x, z: m.a(x) + m.b(z)[places], a=first, b=nn.Linear(2, WIDTH))


def head(sizes: list[int], dense: bool, last: bool) -> nn.Module:
    """[b, ..., WIDTH] -> an output for each target: [b, k], or [b, k, ...] of every position if ``dense``."""

    def forward(m, x):
        x = x if last else x.movedim(1, -1)
        x = x.flatten(1, -2).mean(dim=1) if not dense and x.dim() > 2 else x
        outputs = tuple(out(x).movedim(-1, 1) for out in m.outs)
        return outputs if len(outputs) > 1 else outputs[0]

    return Own(forward, outs=nn.ModuleList(nn.Linear(WIDTH, size) for size in sizes))


class Poisson:
    """A loss as users write it, with a metric."""

    metrics = ("bias",)
    count = staticmethod(torch.numel)

    def __call__(self, output, targets, weights):
        terms, bias = F.poisson_nll_loss(output, targets.to(output), reduction="none"), output.exp() - targets
        weights = terms.new_ones(len(terms)) if weights is None else weights.to(terms)
        weights = weights.view(-1, *[1] * (terms.dim() - 1)).expand_as(terms)
        return Sums((terms * weights).sum(), weights.sum(), ((bias * weights).sum(),))


class Target(NamedTuple):
    """The outputs that a loss needs, what makes its targets of [b, ...], the loss of a run, and torch's."""

    size: int
    make: Callable[[tuple, int, torch.Generator], Tensor]
    loss: Callable[[], object]
    of_torch: Callable[[], nn.Module] | None = None


def floats(shape, k, draw):
    return torch.randn(shape[0], k, *shape[1:], generator=draw)


def classes(shape, k, draw):
    return torch.randint(k, shape, generator=draw)


def some(shape, k, draw, ignored=-100):
    return torch.where(torch.rand(shape, generator=draw) < 0.3, ignored, classes(shape, k, draw))


Cross, OF_CLASSES = nn.CrossEntropyLoss, torch.tensor([1.0, 2.0, 0.5])
LOSSES = {
    "mse": Target(2, floats, nn.MSELoss), "l1": Target(1, floats, nn.L1Loss),
    "classes": Target(CLASSES, classes, Cross), "weighted": Target(CLASSES, some, lambda: Cross(OF_CLASSES)),
    "smooth l1": Target(2, floats, lambda: nn.SmoothL1Loss(beta=0.5)), "ignored": Target(CLASSES, some, Cross),
    "huber": Target(2, floats, lambda: nn.HuberLoss(delta=0.3)),
    "bce": Target(2, lambda *a: (floats(*a) > 0).float(), lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))),
    "another ignored": Target(CLASSES, partial(some, ignored=1), lambda: Cross(ignore_index=1)),
    "smoothed": Target(CLASSES, some, lambda: Cross(OF_CLASSES, label_smoothing=0.2)),
    "probabilities": Target(CLASSES, lambda *a: floats(*a).softmax(dim=1), lambda: Cross(label_smoothing=0.1)),
    "poisson": Target(1, lambda *a: floats(*a).exp().floor(), Poisson, nn.PoissonNLLLoss),
}  # fmt: skip


def spread(outputs, targets):
    """A function as a metric."""
    return {"range": float(outputs.max() - outputs.min()), "rows": float(len(targets))}
