"""The CIFAR-10 classifier: its shapes and its splits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.classifier import classifier

CPU = torch.device("cpu")


@pytest.mark.parametrize("channels, size, flat", [(3, 32, 1024), (1, 28, 576), (3, 8, 64)])
def test_images_of_the_given_size_become_logits(channels, size, flat):
    chain = classifier(in_channels=channels, image_size=size)
    layers = chain.skeleton()
    assert layers(torch.empty(5, channels, size, size, device="meta")).shape == (5, 10)
    assert layers["fc1"][1].in_features == flat
    assert chain.limits == {"channels": channels, "image_size": size, "classes": 10}


def test_it_is_three_convolutions_and_four_linear_layers():
    modules = list(classifier().skeleton().modules())
    assert [sum(isinstance(m, kind) for m in modules) for kind in (nn.Conv2d, nn.Linear)] == [3, 4]
    assert classifier().names == ["conv1", "conv2", "conv3", "fc1", "fc2", "fc3", "fc4"]


@pytest.mark.parametrize("cuts", [[3, 4], [2, 1, 4]])
def test_its_documented_splits_compute_what_the_whole_computes(cuts):
    chain = classifier()
    whole = chain.build(chain.names, 7, CPU)
    x = images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    names = iter(chain.names)
    for layers in cuts:
        x = chain.build([next(names) for _ in range(layers)], 7, CPU)(x)
    assert torch.equal(x, whole(images))
