"""What random programs are built of: layers of eight features, and losses with their targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrizations as of_torch
from torch.utils.checkpoint import checkpoint

from models.attention import attend
from models.cut import Columns, Experts, Rows, Vocabulary
from models.fused_cross_entropy import FusedHead
from models.losses import Sums, TokenCrossEntropy
from models.sequence import positions

WIDTH, LENGTH, SIDE, CLASSES, TOKENS = 8, 12, 4, 3, 24
INPUTS = {"rows": (6,), "sequences": (LENGTH, 6), "tokens": (LENGTH,), "images": (3, SIDE, SIDE)}
linear = partial(nn.Linear, WIDTH, WIDTH)
conv = partial(nn.Conv2d, WIDTH, WIDTH, 3, padding=1)
attention = partial(nn.MultiheadAttention, WIDTH, 2, batch_first=True)
encoder = partial(nn.TransformerEncoderLayer, WIDTH, 2, 12, 0.0, batch_first=True)
# What layers call so that ranks can divide sequences, as torch has it; and how ranks divide modules of these names.
TORCHS = {
    "attend": partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True),
    "positions": lambda length, device: torch.arange(length, device=device),
}
CUT = {
    "words": Vocabulary(), "projection": Vocabulary(), "experts": Experts(), "up": Columns(),
    "gate": Columns(), "down": Rows(), "linear1": Columns(), "linear2": Rows(), "q": Columns(unit=4),
    "k": Columns(unit=4, shared=True), "v": Columns(unit=4, shared=True), "o": Rows(),
}  # fmt: skip


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


def feed(m, x):
    return x + m.down(m.up(x).tanh())


def tied(first: nn.Linear, second: nn.Linear) -> nn.Module:
    second.weight = first.weight
    return Own(lambda m, x: m.b(m.a(x).tanh()), a=first, b=second)


def heads(kv: int = 2, **norm: nn.Module) -> nn.Module:
    """Causal attention by two heads of 4, to ``kv`` heads."""

    def forward(m, x):
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (m.q, m.k, m.v))
        return x + m.o(m.attend(m.n(q) if norm else q, k, v).transpose(1, 2).flatten(2))

    return Own(
        forward, q=linear(), k=nn.Linear(WIDTH, 4 * kv), v=nn.Linear(WIDTH, 4 * kv), o=linear(), attend=attend, **norm
    )


class Stacks(nn.Module):
    """Four experts, of which each token has some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((WIDTH, 6), (6, WIDTH)))

    def forward(self, x, chosen, weights):
        hidden = torch.einsum("ni,nkio->nko", x, self.first[chosen]).tanh()
        return torch.einsum("nki,nkio,nk->no", hidden, self.last[chosen], weights)


def routed(m, x):
    tokens = x.flatten(0, -2)
    shares, chosen = m.router(tokens).softmax(dim=-1).topk(2)
    return x + m.experts(tokens, chosen, shares).reshape(x.shape)


# Of [b, 8] (r), of [b, 12, 8] (s), of [b, 8, 4, 4] (i), of the positions that a rank has (p). With ``CUT``: those whose
# matrices (t) or experts (e) ranks can divide.
BLOCKS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    # torch's layers as they are
    "Tanh": ("rsi", nn.Tanh), "GELU": ("rsi", nn.GELU), "Softplus": ("rsi", nn.Softplus), "PReLU": ("rsi", nn.PReLU),
    "Hardswish": ("rsi", nn.Hardswish), "ReLU in place": ("rsi", lambda: nn.ReLU(inplace=True)),
    "Dropout of 0": ("rsi", lambda: nn.Dropout(0.0)), "Linear": ("rs", linear),
    "LayerNorm": ("rs", lambda: nn.LayerNorm(8)),
    "without bias": ("rs", lambda: linear(bias=False)), "RMSNorm": ("rs", lambda: nn.RMSNorm(WIDTH)),
    "weight_norm": ("rs", lambda: of_torch.weight_norm(linear())), "Moving": ("rs", Moving),
    "orthogonal": ("rs", lambda: of_torch.orthogonal(linear())), "encoder": ("st", encoder),
    "spectral_norm": ("rs", lambda: of_torch.spectral_norm(linear())), "BatchNorm1d": ("r", norm),
    "BatchNorm1d slow": ("r", lambda: nn.BatchNorm1d(WIDTH, momentum=0.01, eps=1e-2)),
    "GroupNorm": ("ri", lambda: nn.GroupNorm(2, WIDTH)), "norm first": ("st", lambda: encoder(norm_first=True)),
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
    # for ranks that share layers, sequences and experts
    "columns and rows": ("rst", lambda: Own(feed, up=nn.Linear(WIDTH, 12), down=nn.Linear(12, WIDTH))),
    "gated": ("rst", lambda: Own(
        lambda m, x: m.down(m.up(x) * m.gate(x).sigmoid()), up=linear(), gate=linear(), down=linear())),
    "heads": ("spt", heads), "shared keys": ("spt", lambda: heads(1)),
    "norm of heads": ("spt", lambda: heads(n=nn.RMSNorm(4))),
    "positions": ("sp", lambda: Own(lambda m, x: x + m.a(m.positions(x.shape[1], x.device)),
                                    a=nn.Embedding(LENGTH, WIDTH), positions=positions)),
    "routed": ("rse", lambda: Own(routed, router=nn.Linear(WIDTH, 4, bias=False), experts=Stacks())),
    # parts that are frozen, in eval mode, not used, used by some samples, without gradients
    "half frozen": ("rst", lambda: Own(feed, up=linear().requires_grad_(False), down=linear())),
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
    "GRUCell": ("rs", lambda: Own(lambda m, x: m.a(x.flatten(0, -2)).reshape(x.shape), a=nn.GRUCell(WIDTH, WIDTH))),
    "Bilinear": ("rs", lambda: Own(lambda m, x: m.a(x, x.contiguous()), a=nn.Bilinear(WIDTH, WIDTH, WIDTH))),
    # of sequences and of images
    "GRU": ("s", lambda: Own(lambda m, x: m.a(x)[0], a=nn.GRU(WIDTH, WIDTH, batch_first=True))),
    "LSTM": ("s", lambda: Own(lambda m, x: m.a(x)[0], a=nn.LSTM(WIDTH, 4, bidirectional=True, batch_first=True))),
    "RNN": ("s", lambda: Own(lambda m, x: x + m.a(x)[0], a=nn.RNN(WIDTH, WIDTH, 2, batch_first=True))),
    "projected": ("s", lambda: Own(lambda m, x: m.a(x)[0], a=nn.LSTM(WIDTH, 12, proj_size=WIDTH, batch_first=True))),
    "attention": ("s", lambda: Own(lambda m, x: x + m.a(x, x, x)[0], a=attention())),
    "bias_kv": ("s", lambda: Own(lambda m, x: m.a(x, x, x)[0], a=attention(add_bias_kv=True))),
    "causal": ("s", lambda: Own(lambda m, x: m.f(*m.a(x).chunk(3, -1)) + x, a=nn.Linear(8, 24), f=TORCHS["attend"])),
    "Conv1d": ("s", lambda: Own(lambda m, x: m.a(x.mT).mT, a=nn.Conv1d(WIDTH, WIDTH, 3, padding=1))),
    "norm of channels": ("s", lambda: Own(lambda m, x: m.a(x.mT).mT, a=norm())),
    "rolled": ("s", lambda: Own(lambda m, x: m.a(x.cumsum(dim=1) / 3) + x.roll(1, dims=1), a=linear())),
    "squeezed": ("i", lambda: Own(lambda m, x: x * m.a(x.mean(dim=(2, 3))).sigmoid()[..., None, None], a=linear())),
    "pixels": ("i", lambda: Own(lambda m, x: m.a(*[x.flatten(2).mT] * 3)[0].mT.unflatten(2, (4, 4)), a=attention())),
    "channels last": ("i", lambda: Own(lambda m, x: m.a(x.contiguous(memory_format=torch.channels_last)), a=conv())),
    "resized": ("i", lambda: Own(lambda m, x: F.avg_pool2d(m.a(F.interpolate(x, scale_factor=2)), 2), a=conv())),
}  # fmt: skip

MOVES = {"spectral_norm", "Moving"}  # what a forward changes


def whole(m, *x):
    """The layers one after the other, by a forward of their own."""
    for layer in m._modules.values():  # children() has a layer that is there twice once
        x = layer(*x)
        x = x if isinstance(x, tuple) else (x,)
    return x if len(x) > 1 else x[0]


def begins(m, *x):
    x = m.a(*x)
    return x, x.tanh()


def stem(domain: str, second: bool, shared: bool) -> nn.Module:
    """One or two inputs -> [b, ..., WIDTH], of images [b, WIDTH, ...]; the second one, [b, 2], is added everywhere."""
    words = {"words": nn.Embedding(TOKENS, WIDTH)} if shared else {"a": nn.Embedding(TOKENS, WIDTH, padding_idx=0)}
    kinds = {"tokens": words, "images": {"a": nn.Conv2d(3, WIDTH, 1)}}
    parts = kinds.get(domain, {"a": nn.Linear(6, WIDTH)}) | ({"b": nn.Linear(2, WIDTH)} if second else {})
    places = {"rows": (...,), "images": (..., None, None)}.get(domain, (slice(None), None))
    return Own(lambda m, x, *z: next(m.children())(x) + (m.b(*z)[places] if z else 0), **parts)


class Words(FusedHead):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, TOKENS)


def head(targets: tuple[str, ...], domain: str, dense: bool, shared: bool) -> nn.Module:
    """[b, ..., WIDTH], of images [b, WIDTH, ...] -> an output for each target.

    [b, k], or of every position if ``dense``: [b, k, ...], and [b, ..., k] if ranks can divide the positions.
    """
    if shared and targets == ("words",):
        return Words()

    def forward(m, x):
        x = x.movedim(1, -1) if domain == "images" else x
        x = x.flatten(1, -2).mean(dim=1) if not dense and x.dim() > 2 else x
        outputs = tuple(out(x) if shared else out(x).movedim(-1, 1) for out in m.outs)
        return outputs if len(outputs) > 1 else outputs[0]

    return Own(forward, outs=nn.ModuleList(nn.Linear(WIDTH, LOSSES[name].size) for name in targets))


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
    """The outputs that a loss needs, what makes its targets of [b, ...], a run's loss, and torch's if it differs."""

    size: int
    make: Callable[[tuple, int, torch.Generator], Tensor]
    loss: Callable[[], object]
    other: Callable[[], nn.Module] | None = None

    def of_torch(self) -> nn.Module:
        return (self.other or self.loss)()

    @property
    def metrics(self) -> list[str]:
        """Those in ``METRICS`` that fit."""
        of_classes = isinstance(self.of_torch(), (nn.CrossEntropyLoss, nn.BCEWithLogitsLoss))
        return ["auroc", "f1_score", "spread"] if of_classes else ["mean_absolute_error", "spread"]


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
    "words": Target(TOKENS, some, TokenCrossEntropy, Cross),
}  # fmt: skip
SHARED = ["words", "mse", "l1", "smooth l1", "huber", "bce", "poisson"]  # losses of [b, t, k]
# The number's name, and what is typed.
METRICS = {
    "auroc": ("AUROC", {}), "f1_score": ("F1Score", {"average": "macro"}),
    "mean_absolute_error": ("MeanAbsoluteError", {}), "spread": ("plain.blocks.spread", {}),
}  # fmt: skip


def spread(outputs, targets):
    """A function as a metric."""
    return {"range": float(outputs.max() - outputs.min()), "rows": float(len(targets))}
