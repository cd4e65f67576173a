"""The ``model=`` options."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore


@dataclass
class Toy:
    _target_: str = "models.toy.toy"
    name: str = "toy"
    in_features: int = 10
    hidden: int = 10
    out_features: int = 5
    init_from: str | None = None  # start from exported weights: a folder or a .safetensors file


Size = Enum("Size", {size: size for size in ("124M", "350M", "774M", "1558M", "tiny")})


@dataclass
class GPT2:
    _target_: str = "models.gpt2.gpt2"
    name: str = "gpt2"
    vocabulary: str = "gpt2"  # of the data: gpt2 | words
    size: Size = Size["124M"]
    n_layer: int | None = None  # these four: null takes the size's own
    n_head: int | None = None
    n_embd: int | None = None
    block_size: int | None = None  # positions: the longest sequence, in tokens
    vocab_size: int = 50304  # 50257 is GPT-2's own; padded to a multiple of 128 it is faster on every device
    dropout: float = 0.0
    init_from: str | None = None  # start from exported or Hugging Face weights: a folder or a .safetensors file
    extra_tokens: Any = None  # behind GPT-2's own: {"<a>": "start of an entity", "<b>": null}


@dataclass
class Transformer:
    _target_: str = "models.transformer.transformer"
    name: str = "transformer"
    vocabulary: str = "words"  # of the data: gpt2 | words
    d_model: int = 192  # width; even, and a multiple of n_head
    d_hid: int = 384  # width between the two linear maps of a layer
    n_head: int = 4
    n_layer: int = 2
    dropout: float = 0.2
    max_len: int = 512  # positions: the longest sequence, in tokens
    vocab_size: int | None = None  # null: the data's
    init_from: str | None = None  # start from exported weights: a folder or a .safetensors file


ImageLoss = Enum("ImageLoss", {loss: loss for loss in ("mse", "cross_entropy")})


@dataclass
class ResNet50:
    _target_: str = "models.resnet50.resnet50"
    name: str = "resnet50"
    in_channels: int = 3
    num_classes: int = 1000
    loss: ImageLoss = ImageLoss["mse"]  # mse: squared error to the one-hot class; cross_entropy: with accuracy
    channels_last: bool = True  # images with their channels innermost in memory: faster, the same numbers
    init_from: str | None = None  # start from exported weights: a folder or a .safetensors file


@dataclass
class Classifier:
    _target_: str = "models.classifier.classifier"
    name: str = "classifier"
    in_channels: int = 3
    image_size: int = 32  # pixels a side
    num_classes: int = 10
    init_from: str | None = None  # start from exported weights: a folder or a .safetensors file


@dataclass
class ConvNet:
    _target_: str = "models.convnet.convnet"
    name: str = "convnet"
    in_channels: int = 1
    image_size: int = 28  # pixels a side
    num_classes: int = 10
    init_from: str | None = None  # start from exported weights: a folder or a .safetensors file


def register(store: ConfigStore) -> None:
    options = {
        "toy": Toy,
        "gpt2": GPT2,
        "transformer": Transformer,
        "resnet50": ResNet50,
        "classifier": Classifier,
        "convnet": ConvNet,
    }
    for name, node in options.items():
        store.store(group="schema/model", name=name, node=node)
