"""What the tests of strategies train: small models, and batches from which they learn in a few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from tuple_models import TUPLE_MODELS

from conf.composition import compose
from conf.instantiate import to_config, to_dict
from data.dataset import Batch
from models.chain import Chain
from models.classifier import classifier
from models.convnet import convnet
from models.gpt2 import gpt2
from models.losses import ClassCrossEntropy, SquaredError
from models.resnet50 import GROUPS, resnet50
from models.sequential import chain_of
from models.toy import toy
from models.transformer import transformer
from training.setup import model_and_data

if TYPE_CHECKING:
    from cases import Recipe

VOCABULARY, TOKENS = 512, 32


def short_resnet() -> Chain:
    """ResNet-50 with 5 of its 16 blocks, each kind of them, narrower but for the last."""
    blocks = {"layer1": (2, 16, 1), "layer2": (1, 32, 2), "layer3": (1, 64, 2), "layer4": (1, 512, 2)}
    with mock.patch.dict(GROUPS, blocks):
        return resnet50()


class Partly(nn.Module):
    """Has a parameter that it never uses, one without elements, and one that it uses for some micro-batches only."""

    def __init__(self, sometimes: bool) -> None:
        super().__init__()
        self.used, self.unused, self.rarely = (nn.Linear(8, 8) for _ in range(3))
        self.empty, self.sometimes = nn.Parameter(torch.zeros(0)), sometimes

    def forward(self, x: Tensor) -> Tensor:
        y = self.used(x) + self.empty.sum()
        return y + self.rarely(x) if self.sometimes and x.sum() > 0 else y


def sequential(sometimes: bool) -> Chain:
    """Layers as torch has them. Two of them are one, and frozen; with two stages, the second begins in place."""
    torch.manual_seed(0)
    twice = nn.Linear(8, 8)
    twice.weight.requires_grad_(False)
    layers = [twice, nn.BatchNorm1d(8), nn.ReLU(inplace=True), Partly(sometimes), nn.ReLU(inplace=True), twice]
    return chain_of(nn.Sequential(*layers, nn.Linear(8, 10)), ClassCrossEntropy())


# (channels, size, chain) of small versions of the image models.
IMAGES = {
    "resnet50": (3, 40, short_resnet),
    "whole resnet50": (3, 40, resnet50),
    "classifier": (3, 16, lambda: classifier(image_size=16)),
    "convnet": (1, 12, lambda: convnet(image_size=12)),
}
LANGUAGE = {
    "gpt2": lambda dropout: gpt2(size="tiny", vocab_size=VOCABULARY, dropout=dropout),
    "transformer": lambda dropout: transformer(
        d_model=32, d_hid=64, n_head=2, n_layer=3, dropout=dropout, vocab_size=VOCABULARY
    ),
}


def torchs_encoder() -> Chain:
    """Two encoder layers on the first stage of two, on sequences of one position."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True) for _ in range(2)]
    layers = [nn.Unflatten(1, (1, 8)), *layers, nn.Flatten(), nn.Linear(8, 10)]
    return chain_of(nn.Sequential(*layers), ClassCrossEntropy())


class Island(nn.Linear):
    """A layer that computes in float32 whatever the precision is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


def with_an_island() -> Chain:
    return chain_of(nn.Sequential(nn.Linear(10, 16), Island(16, 16), nn.Linear(16, 5)), SquaredError())


def chain_and_batches(recipe: Recipe) -> tuple[Chain, Callable[[int], Batch]]:
    """A small model, and its global batch as a function of the step."""
    if recipe.model in ("toy", "island"):
        chain = toy() if recipe.model == "toy" else with_an_island()
        return chain, lambda step: _toy_batch(recipe.global_batch, step)
    if recipe.model.startswith("sequential"):
        chain = sequential(sometimes="sometimes" in recipe.model)
        return chain, lambda step: _features(recipe.global_batch, step)
    if recipe.model == "torch's encoder":
        return torchs_encoder(), lambda step: _features(recipe.global_batch, 0)
    if recipe.model in TUPLE_MODELS:
        build_chain, batch = TUPLE_MODELS[recipe.model]
        return build_chain(), lambda step: batch(recipe.global_batch, step)
    if recipe.model in IMAGES:
        channels, size, build_chain = IMAGES[recipe.model]
        return build_chain(), lambda step: _image_batch(recipe.global_batch, channels, size, step)
    if recipe.model in LANGUAGE:
        return LANGUAGE[recipe.model](recipe.dropout), lambda step: _token_batch(recipe.global_batch, step)
    return _configured(recipe)


def _configured(recipe: Recipe) -> tuple[Chain, Callable[[int], Batch]]:
    """A model of conf/model with the data that it brings, the same batch at each step."""
    chain, data = model_and_data(to_config(to_dict(compose([f"model={recipe.model}"]))))
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


def _image_batch(size: int, channels: int, pixels: int, step: int) -> Batch:
    """Bright where the class says so: something to learn in twenty steps."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(10, (size,), generator=generator)
    images = torch.randn(size, channels, pixels, pixels, generator=generator)
    return Batch(images + labels.view(-1, 1, 1, 1) / 5 - 1, labels)


def _token_batch(size: int, step: int) -> Batch:
    """Few words are frequent, as in a language: there is something to learn in twenty steps."""
    draws = torch.rand(size, TOKENS + 1, generator=torch.Generator().manual_seed(step))
    tokens = (draws.pow(4) * VOCABULARY).long()
    return Batch(tokens[:, :-1], tokens[:, 1:])
