"""Small models whose layers pass tuples of tensors on: skip connections, two inputs, an auxiliary loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.dataset import Batch
from models.batchnorm import BatchNorm2d
from models.chain import Chain, LayerSpec
from models.losses import SquaredError, Sums, TokenCrossEntropy

WORDS, LENGTH, WIDTH = 40, 6, 16


class Down(nn.Module):
    """(x [b, c, s, s], *skips) -> (x at half the size, x, *skips)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.norm = BatchNorm2d(after)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        x = F.relu(self.norm(self.convolution(x)))
        return F.avg_pool2d(x, 2), x, *skips


class Middle(nn.Module):
    """(x, *skips) -> (x, *skips): the skips pass through untouched."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        return F.relu(self.convolution(x)), *skips


class Up(nn.Module):
    """(x, skip, *skips) -> (x at twice the size, *skips)."""

    def __init__(self, before: int, skip: int, after: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before + skip, after, 3, padding=1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, skip: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        x = torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1)
        return self.dropout(F.relu(self.convolution(x))), *skips


def unet() -> Chain:
    """Images [b, 3, 8, 8] -> [b, 1, 8, 8], in channels_last."""
    return Chain(
        [
            LayerSpec("down1", lambda: Down(3, 6)),
            LayerSpec("down2", lambda: Down(6, 8)),
            LayerSpec("middle", lambda: Middle(8)),
            LayerSpec("up2", lambda: Up(8, 8, 8)),
            LayerSpec("up1", lambda: Up(8, 6, 6)),
            LayerSpec("head", lambda: nn.Conv2d(6, 1, 1)),
        ],
        loss=SquaredError(),
        channels_last=True,
    )


def unet_batch(size: int, step: int) -> Batch:
    images = torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(step))
    return Batch(images, images.sum(dim=1, keepdim=True).abs())


class Attention(nn.Module):
    """Single-headed attention of x [b, t, c] to memory [b, s, c], where mask [b, s] is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(memory).transpose(1, 2) / WIDTH**0.5
        scores = scores + (1 - mask.to(scores.dtype)).unsqueeze(1) * -100.0
        return self.norm(x + self.dropout(scores.softmax(dim=-1) @ self.value(memory)))


class EmbedSource(nn.Module):
    """(source, target) [b, t] int64 -> (hidden [b, t, c], mask [b, t] without gradient, target)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return self.embedding(source), (source > 0).float(), target


class Encoder(nn.Module):
    """(hidden, mask, target) -> the same, hidden states changed."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, hidden: Tensor, mask: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return self.attention(hidden, hidden, mask), mask, target


class EmbedTarget(nn.Module):
    """(memory, mask, target) -> (memory, mask, decoder's hidden [b, t, c]): of no tensor that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def forward(self, memory: Tensor, mask: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return memory, mask, self.embedding(target)


class Decoder(nn.Module):
    """(memory, mask, hidden) -> the same, hidden states changed."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, memory: Tensor, mask: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        return memory, mask, self.attention(hidden, memory, mask)


class Words(nn.Module):
    """(memory, mask, hidden) -> logits [b, t, words]."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, memory: Tensor, mask: Tensor, hidden: Tensor) -> Tensor:
        return self.projection(hidden)


def translator() -> Chain:
    """Two token inputs [b, t] -> logits of the next target token; target embedding and projection are tied."""
    return Chain(
        [
            LayerSpec("embed_source", EmbedSource),
            LayerSpec("encoder", Encoder),
            LayerSpec("embed_target", EmbedTarget),
            LayerSpec("decoder1", Decoder),
            LayerSpec("decoder2", Decoder),
            LayerSpec("words", Words),
        ],
        loss=TokenCrossEntropy(),
        tied={"words.projection.weight": "embed_target.embedding.weight"},
    )


def translator_batch(size: int, step: int) -> Batch:
    draws = torch.rand(size, 2 * LENGTH + 1, generator=torch.Generator().manual_seed(step))
    tokens = (draws.pow(3) * WORDS).long()
    source, target = tokens[:, :LENGTH], tokens[:, LENGTH:]
    return Batch((source, target[:, :-1]), target[:, 1:])


class EmbedWithoutLoss(nn.Module):
    """Tokens [b, t] -> (hidden [b, t, c], an auxiliary loss of 0 without gradient)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(tokens)
        return hidden, torch.zeros((), device=hidden.device, dtype=torch.float32)


class Experts(nn.Module):
    """(hidden [b, t, c], auxiliary loss) -> the same: each token goes to the better two of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(hidden).softmax(dim=-1)
        gates = shares * (shares > shares.amin(dim=-1, keepdim=True))
        mixed = sum(gates[..., i : i + 1] * expert(hidden) for i, expert in enumerate(self.experts))
        balance = shares.flatten(0, -2).float().mean(dim=0).square().sum()
        return hidden + self.dropout(mixed.tanh()), auxiliary + balance


class LogitsAndLoss(nn.Module):
    """(hidden, auxiliary loss) -> (logits [b, t, words], auxiliary loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WORDS)

    def forward(self, hidden: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
        return self.projection(hidden), auxiliary


class WithAuxiliaryLoss:
    """Cross entropy of the logits, and a tenth of the auxiliary loss for each token."""

    metrics: tuple[str, ...] = ()

    def __call__(self, output: tuple[Tensor, Tensor], targets: Tensor, weights: Tensor | None) -> Sums:
        logits, auxiliary = output
        sums = TokenCrossEntropy()(logits, targets, weights)
        return Sums(sums.loss + 0.1 * auxiliary * sums.count, sums.count)


def mixture() -> Chain:
    """Tokens [b, t] -> logits, through three mixtures of experts."""
    return Chain(
        [
            LayerSpec("embedding", EmbedWithoutLoss),
            *(LayerSpec(f"experts{i}", Experts) for i in range(3)),
            LayerSpec("head", LogitsAndLoss),
        ],
        loss=WithAuxiliaryLoss(),
    )


def mixture_batch(size: int, step: int) -> Batch:
    draws = torch.rand(size, LENGTH + 1, generator=torch.Generator().manual_seed(step))
    tokens = (draws.pow(3) * WORDS).long()
    return Batch(tokens[:, :-1], tokens[:, 1:])


TUPLE_MODELS: dict[str, tuple[Callable[[], Chain], Callable[[int, int], Batch]]] = {
    "unet": (unet, unet_batch),
    "translator": (translator, translator_batch),
    "mixture": (mixture, mixture_batch),
}
