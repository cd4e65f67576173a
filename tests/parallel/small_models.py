"""What the tests of strategies train: small models, and batches from which they learn in a few steps.

The layers of ``unet`` and ``translator`` pass tuples of tensors on: skip connections; two inputs, a mask, a loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.composition import compose
from conf.instantiate import to_config, to_dict
from data.dataset import Batch
from models.batchnorm import BatchNorm2d
from models.causal_lm import causal_lm
from models.chain import Chain, LayerSpec
from models.classifier import classifier
from models.convnet import convnet
from models.cut import Columns, Rows
from models.gpt2 import gpt2
from models.llama import llama
from models.lora import adapt
from models.losses import ClassCrossEntropy, SquaredError, Sums, TokenCrossEntropy
from models.moe import moe
from models.resnet50 import GROUPS, resnet50
from models.sequential import chain_of
from models.toy import toy
from models.transformer import transformer
from training.run.prepare import model_and_data

if TYPE_CHECKING:
    from cases import Recipe

VOCABULARY, TOKENS = 512, 32
WORDS, LENGTH, WIDTH = 40, 6, 16


def short_resnet() -> Chain:
    """ResNet-50 with 5 of its 16 blocks, each kind of them, narrower."""
    blocks = {"layer1": (2, 16, 1), "layer2": (1, 32, 2), "layer3": (1, 64, 2), "layer4": (1, 128, 2)}
    with mock.patch.dict(GROUPS, blocks):
        chain = resnet50()
    return replace(chain, layers=[*chain.layers[:-1], LayerSpec("fc", lambda: nn.Linear(512, 10))])


class Partly(nn.Module):
    """Has a parameter that it never uses, one without elements, and one that it uses for some micro-batches only.

    Two others are added up, so that autograd computes one gradient for both.
    """

    def __init__(self, sometimes: bool) -> None:
        super().__init__()
        self.used, self.unused, self.rarely = (nn.Linear(8, 8) for _ in range(3))
        self.empty, self.sometimes = nn.Parameter(torch.zeros(0)), sometimes
        self.one, self.other = (nn.Parameter(torch.zeros(8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.used(x) + self.empty.sum() + (self.one + self.other)
        return y + self.rarely(x) if self.sometimes and x.sum() > 0 else y


def sequential(sometimes: bool) -> Chain:
    """Layers as torch has them. Two of them are one, and frozen; with two stages, the second begins in place."""
    torch.manual_seed(0)
    twice = nn.Linear(8, 8)
    twice.weight.requires_grad_(False)
    layers = [twice, nn.BatchNorm1d(8), nn.ReLU(inplace=True), Partly(sometimes), nn.ReLU(inplace=True), twice]
    return chain_of(nn.Sequential(*layers, nn.Linear(8, 10)), ClassCrossEntropy())


class InPlace(nn.Linear):
    """A residual block that begins in place, as most do: x + f(x) is relu(x) + f(x). Its output is a view."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(F.relu(x, inplace=True)).masked_fill_(x > 1, 0.5).view(-1, 2, 4).flatten(1)
        return (x + F.relu_(y)).flatten(0, 0)


class Shifted(nn.Module):
    """Changes its input, be it that of the model, in place. It has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        x += 0.1
        return x.mul_(0.5)


class ShiftedCrossEntropy(ClassCrossEntropy):
    """Changes the model's output in place."""

    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        output -= output.detach().max()
        return super().__call__(output, targets, weights)


def in_place() -> Chain:
    torch.manual_seed(0)
    last = nn.Sequential(InPlace(8, 8), nn.Dropout(0.2, inplace=True), nn.Linear(8, 10), nn.Flatten())
    layers = [Shifted(), nn.Linear(8, 8), InPlace(8, 8), Shifted(), last]
    return chain_of(nn.Sequential(*layers), ShiftedCrossEntropy())


class PassedOn(nn.Linear):
    """x [b, 8] -> (the same, its weight). Only a later layer uses the weight."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x + self.bias).tanh(), self.weight


class PassingOn(nn.Linear):
    """(x [b, 8], weight) -> the same."""

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x).tanh(), weight


class Applied(nn.Linear):
    """(x [b, 8], weight [8, 8]) -> [b, 10]."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().forward(F.linear(x, weight))


def passed_on() -> Chain:
    """The last stage of four uses a weight of the second one."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), PassedOn(8, 8), PassingOn(8, 8), Applied(8, 10)]
    return chain_of(nn.Sequential(*layers), ClassCrossEntropy())


# (channels, size, chain) of small versions of the image models.
IMAGES = {
    "resnet50": (3, 40, short_resnet),
    "whole resnet50": (3, 40, resnet50),
    "classifier": (3, 16, lambda: classifier(image_size=16)),
    "convnet": (1, 12, lambda: convnet(image_size=12)),
}
SMALL_LLAMA = dict(n_layer=6, n_head=4, kv_heads=2, head_dim=8, n_embd=48, mlp_width=64, block_size=256, init_std=0.05)
SMALL_MOE = dict(n_layer=3, n_head=4, kv_heads=2, head_dim=8, n_embd=32, experts=4, expert_width=24, block_size=256)
LANGUAGE = {
    "llama": lambda dropout: llama(**SMALL_LLAMA, vocab_size=VOCABULARY, qk_norm=True),
    "gpt2": lambda dropout: gpt2(size="tiny", n_layer=4, vocab_size=VOCABULARY, dropout=dropout),
    "moe": lambda dropout: moe(**SMALL_MOE, vocab_size=VOCABULARY, shared_experts=1, bias_rate=0.01, balance=0.1),
    "transformers": lambda dropout: of_transformers("qwen3", intermediate_size=64),
    "mixture": lambda dropout: of_transformers(
        "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "transformer": lambda dropout: transformer(
        d_model=32, d_hid=64, n_head=2, n_layer=3, dropout=dropout, vocab_size=VOCABULARY
    ),
}


@cache
def of_transformers(kind: str, **more) -> Chain:
    """Qwen 3, or its mixture: two heads of keys for four of queries, each normalized; not tied."""
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    sizes = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    sizes |= dict(vocab_size=VOCABULARY, max_position_embeddings=256, initializer_range=0.05)
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({"model_type": kind, **sizes, **more}))
        return causal_lm(str(config))


def torchs_encoder() -> Chain:
    """Two encoder layers on the first stage of two, on sequences of one position."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True) for _ in range(2)]
    layers = [nn.Unflatten(1, (1, 8)), *layers, nn.Flatten(), nn.Linear(8, 10)]
    return chain_of(nn.Sequential(*layers), ClassCrossEntropy())


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
    layers = {"down1": partial(Down, 3, 6), "down2": partial(Down, 6, 8), "middle": partial(Middle, 8)}
    layers |= {"up2": partial(Up, 8, 8, 8), "up1": partial(Up, 8, 6, 6), "head": partial(nn.Conv2d, 6, 1, 1)}
    return Chain([LayerSpec(*named) for named in layers.items()], loss=SquaredError(), channels_last=True)


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
    """(source, target) [b, t] int64 -> (hidden [b, t, c], mask [b, t], target, an auxiliary loss of 0).

    Only the first has a gradient; the last gets one in the next layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return self.embedding(source), (source > 0).float(), target, torch.zeros((), device=source.device)


class Encoder(nn.Module):
    """(hidden, mask, target, auxiliary) -> the same: hidden states changed, and a mean over the micro-batch added."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, hidden: Tensor, mask: Tensor, target: Tensor, auxiliary: Tensor) -> tuple[Tensor, ...]:
        hidden = self.attention(hidden, hidden, mask)
        return hidden, mask, target, auxiliary + hidden.float().mean((0, 1)).square().sum()


class EmbedTarget(nn.Module):
    """(memory, mask, target, auxiliary) -> the same, target as hidden [b, t, c]: of no tensor that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def forward(self, memory: Tensor, mask: Tensor, target: Tensor, auxiliary: Tensor) -> tuple[Tensor, ...]:
        return memory, mask, self.embedding(target), auxiliary


class Decoder(nn.Module):
    """(memory, mask, hidden, auxiliary) -> the same, hidden states changed."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, memory: Tensor, mask: Tensor, hidden: Tensor, auxiliary: Tensor) -> tuple[Tensor, ...]:
        return memory, mask, self.attention(hidden, memory, mask), auxiliary


class Words(nn.Module):
    """(memory, mask, hidden, auxiliary) -> (logits [b, t, words], auxiliary)."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, memory: Tensor, mask: Tensor, hidden: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
        return self.projection(hidden), auxiliary


class WithAuxiliaryLoss:
    """Cross entropy of the logits, and a tenth of the auxiliary loss for each token."""

    metrics: tuple[str, ...] = ()

    def __call__(self, output: tuple[Tensor, Tensor], targets: Tensor, weights: Tensor | None) -> Sums:
        logits, auxiliary = output
        sums = TokenCrossEntropy()(logits, targets, weights)
        return Sums(sums.loss + 0.1 * auxiliary * sums.count, sums.count)


def translator() -> Chain:
    """Two token inputs [b, t] -> logits of the next target token; its embedding and projection are tied."""
    layers = {"embed_source": EmbedSource, "encoder": Encoder, "embed_target": EmbedTarget}
    layers |= {"decoder1": Decoder, "decoder2": Decoder, "words": Words}
    tied = {"words.projection.weight": "embed_target.embedding.weight"}
    return Chain([LayerSpec(*named) for named in layers.items()], loss=WithAuxiliaryLoss(), tied=tied)


def translator_batch(size: int, step: int) -> Batch:
    draws = torch.rand(size, 2 * LENGTH + 1, generator=torch.Generator().manual_seed(step))
    tokens = (draws.pow(3) * WORDS).long()
    source, target = tokens[:, :LENGTH], tokens[:, LENGTH:]
    return Batch((source, target[:, :-1]), target[:, 1:])


def perceptrons() -> Chain:
    """Positions [b, t, 8] -> [b, t, 8] through layers that are all cut, the first and the last one as well."""
    torch.manual_seed(0)
    parts = [[nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.LayerNorm(8), nn.Dropout(0.1)] for _ in range(3)]
    chain = chain_of(nn.Sequential(*(nn.Sequential(*part) for part in parts)), SquaredError())
    return replace(chain, cut={"*.0": Columns(), "*.2": Rows()})


class Island(nn.Linear):
    """A layer that computes in float32 whatever the precision is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


def with_an_island() -> Chain:
    return chain_of(nn.Sequential(nn.Linear(10, 16), Island(16, 16), nn.Linear(16, 5)), SquaredError())


def chain_and_batches(recipe: Recipe) -> tuple[Chain, Callable[[int], Batch]]:
    """A small model, with adapters where it has some, and its global batch as a function of the step."""
    chain, batch_at = _chain_and_batches(recipe)
    return chain if recipe.lora is None else adapt(chain, 3, 6, recipe.dropout, recipe.lora), batch_at


def _chain_and_batches(recipe: Recipe) -> tuple[Chain, Callable[[int], Batch]]:
    if recipe.model in IMAGES:
        channels, size, build_chain = IMAGES[recipe.model]
        return build_chain(), lambda step: _image_batch(recipe.global_batch, channels, size, step)
    if recipe.model in LANGUAGE:
        return LANGUAGE[recipe.model](recipe.dropout), lambda step: _token_batch(recipe, step)
    if recipe.model not in OTHERS:
        return _configured(recipe)
    build_chain, batch = OTHERS[recipe.model]
    return build_chain(), lambda step: batch(recipe.global_batch, step)


def _configured(recipe: Recipe) -> tuple[Chain, Callable[[int], Batch]]:
    """A model of conf/model with the data that it brings, the same batch at each step."""
    _, chain, data = model_and_data(to_config(to_dict(compose([f"model={recipe.model}"]))))
    data.prepare()
    batch = Batch(*data.train.read(np.arange(recipe.global_batch), 0))
    return chain, lambda step: batch


def _toy_batch(size: int, step: int) -> Batch:
    inputs = torch.randn(size, 10, generator=torch.Generator().manual_seed(step))
    return Batch(inputs, inputs[:, :5].abs() + 1.0)


def _features(size: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, 8, generator=generator)
    return Batch(inputs, torch.randint(10, (size,), generator=generator))


def _positions(size: int, step: int) -> Batch:
    inputs = torch.randn(size, 6, 8, generator=torch.Generator().manual_seed(step))
    return Batch(inputs, inputs.abs())


def _image_batch(size: int, channels: int, pixels: int, step: int) -> Batch:
    """Bright where the class says so: something to learn in twenty steps."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(10, (size,), generator=generator)
    images = torch.randn(size, channels, pixels, pixels, generator=generator)
    return Batch(images + labels.view(-1, 1, 1, 1) / 5 - 1, labels)


def _token_batch(recipe: Recipe, step: int) -> Batch:
    """Few words are frequent, as in a language: there is something to learn in twenty steps."""
    draws = torch.rand(recipe.global_batch, TOKENS + 1, generator=torch.Generator().manual_seed(step))
    width = recipe.widths[step % len(recipe.widths)] if recipe.widths and step else TOKENS
    tokens = (draws.pow(4) * VOCABULARY).long()[:, : width + 1]
    return Batch(tokens[:, :-1], tokens[:, 1:])


OTHERS = {
    "toy": (toy, _toy_batch),
    "island": (with_an_island, _toy_batch),
    "sequential": (partial(sequential, sometimes=False), _features),
    "sequential sometimes": (partial(sequential, sometimes=True), _features),
    "in place": (in_place, _features),
    "passed on": (passed_on, _features),
    "perceptrons": (perceptrons, _positions),
    "torch's encoder": (torchs_encoder, lambda size, step: _features(size, 0)),
    "unet": (unet, unet_batch),
    "translator": (translator, translator_batch),
}
