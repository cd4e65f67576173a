"""A small image classifier: three convolutions and four linear layers, as in the usual CIFAR-10 tutorials."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from torch import nn

from models.chain import Chain, LayerSpec, check_sizes, reset_parameters
from models.losses import ClassCrossEntropy

CHANNELS = (16, 32, 64)
WIDTHS = (512, 128, 64)


def classifier(in_channels: int = 3, image_size: int = 32, num_classes: int = 10) -> Chain:
    """Build a chain of seven layers, images [b, in_channels, image_size, image_size] -> logits [b, num_classes].

    conv1 to conv3 are a 3x3 convolution, ReLU and a halving of the image. fc1 to fc4 are a linear layer and, except in
    the last one, ReLU. ``parallel.balance=[3,4]`` puts the features on one stage and the classifier on the other.
    ``parallel.balance=[2,1,4]`` is a split into three stages like the published one.

    The loss is cross entropy on the logits. The published code applies binary cross entropy to a softmax. This treats
    exclusive classes as ten yes-no questions, and its gradient vanishes if the softmax saturates on a wrong class.
    """
    check_sizes(in_channels=in_channels, num_classes=num_classes)
    if (side := image_size // 2 ** len(CHANNELS)) < 1:
        raise ValueError(f"model.image_size={image_size} is halved three times, so it must be at least 8")
    channels = pairwise((in_channels, *CHANNELS))
    widths = pairwise((side * side * CHANNELS[-1], *WIDTHS))
    return Chain(
        layers=[
            *(LayerSpec(f"conv{i}", partial(_convolution, a, b)) for i, (a, b) in enumerate(channels, start=1)),
            *(LayerSpec(f"fc{i}", partial(_linear, a, b)) for i, (a, b) in enumerate(widths, start=1)),
            LayerSpec(f"fc{len(WIDTHS) + 1}", partial(nn.Linear, WIDTHS[-1], num_classes)),
        ],
        loss=ClassCrossEntropy(),
        initialise=reset_parameters,
        limits={"channels": in_channels, "image_size": image_size, "classes": num_classes},
    )


def _convolution(before: int, after: int) -> nn.Module:
    """[b, before, s, s] -> [b, after, s // 2, s // 2]."""
    return nn.Sequential(nn.Conv2d(before, after, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def _linear(before: int, after: int) -> nn.Module:
    """[b, ...] with ``before`` numbers per sample -> [b, after]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(before, after), nn.ReLU())
