"""The MNIST network of PyTorch's tutorials: two convolution blocks with BatchNorm and one linear layer."""

from __future__ import annotations

from functools import partial

from torch import nn

from models.batchnorm import BatchNorm2d
from models.chain import Chain, LayerSpec, check_sizes, reset_parameters
from models.losses import ClassCrossEntropy


def convnet(in_channels: int = 1, image_size: int = 28, num_classes: int = 10) -> Chain:
    """Build a chain of three layers, images [b, in_channels, image_size, image_size] -> logits [b, num_classes].

    Each block is a 5x5 convolution, BatchNorm, ReLU and a halving of the image, to 16 and to 32 channels. Keys are the
    published model's keys: ``layer1.0.weight``, ..., ``fc.bias``.
    """
    check_sizes(in_channels=in_channels, num_classes=num_classes)
    if (side := image_size // 4) < 1:
        raise ValueError(f"model.image_size={image_size} is halved twice, so it must be at least 4")
    return Chain(
        layers=[
            LayerSpec("layer1", partial(_block, in_channels, 16)),
            LayerSpec("layer2", lambda: _block(16, 32).append(nn.Flatten())),
            LayerSpec("fc", partial(nn.Linear, side * side * 32, num_classes)),
        ],
        loss=ClassCrossEntropy(),
        initialise=reset_parameters,
        limits={"channels": in_channels, "image_size": image_size, "classes": num_classes},
    )


def _block(before: int, after: int) -> nn.Sequential:
    """[b, before, s, s] -> [b, after, s // 2, s // 2]."""
    return nn.Sequential(
        nn.Conv2d(before, after, kernel_size=5, padding=2), BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)
    )
