"""The MNIST network: the published keys and shapes, and that it learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.batchnorm import BatchNorm2d
from models.convnet import convnet

CPU = torch.device("cpu")


class Published(nn.Module):
    """The network as the tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(x)).flatten(1))


@pytest.mark.parametrize("training", [True, False])
def test_logits_are_the_published_network_s_with_its_weights(training):
    chain, published = convnet(), Published().train(training)
    layers = chain.build(chain.names, 2, CPU).train(training)
    layers.load_state_dict(published.state_dict())
    images = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layers(images), published(images))


def test_every_batchnorm_takes_one_update_a_step():
    norms = [m for m in convnet().skeleton().modules() if isinstance(m, nn.BatchNorm2d)]
    assert [type(norm) for norm in norms] == [BatchNorm2d, BatchNorm2d]


@pytest.mark.parametrize("channels, size", [(3, 32), (1, 8), (1, 30)])
def test_images_of_the_given_size_become_logits(channels, size):
    chain = convnet(in_channels=channels, image_size=size, num_classes=7)
    assert chain.skeleton()(torch.empty(2, channels, size, size, device="meta")).shape == (2, 7)
    assert chain.limits == {"channels": channels, "image_size": size, "classes": 7}


def test_it_learns_which_half_of_an_image_is_bright():
    chain = convnet(image_size=8, num_classes=2)
    layers = chain.build(chain.names, 1, CPU)
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(0, 2, (64,), generator=generator)
    images = torch.randn(64, 1, 8, 8, generator=generator)
    images[classes == 1, :, 4:] += 1
    images[classes == 0, :, :4] += 1
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
    for _ in range(20):
        sums = chain.loss(layers(images), classes, None)
        optimizer.zero_grad()
        (sums.loss / sums.count).backward()
        optimizer.step()
    assert sums.metrics[0] / sums.count > 0.95
