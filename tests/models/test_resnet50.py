"""ResNet-50: how its weights start, its published split, its loss."""

import math

import pytest
import torch

from models.batchnorm import BatchNorm2d
from models.losses import ClassCrossEntropy, OneHotSquaredError
from models.resnet50 import resnet50

CPU = torch.device("cpu")
CHAIN = resnet50()


def test_weights_start_as_torchvision_s():
    layers = CHAIN.build(CHAIN.names, 1, CPU)
    for name, module in layers.named_modules():
        if isinstance(module, torch.nn.Conv2d):
            std = math.sqrt(2 / (module.out_channels * module.kernel_size[0] * module.kernel_size[1]))
            assert module.weight.std().item() == pytest.approx(std, rel=0.03), name
        elif isinstance(module, BatchNorm2d):
            values = (module.weight, module.bias, module.running_mean, module.running_var)
            assert [value.unique().tolist() for value in values] == [[1.0], [0.0], [0.0], [1.0]], name
            assert module.num_batches_tracked == 0
            assert not module.moments.any()
    bound = 1 / math.sqrt(2048)
    assert layers["fc"].weight.abs().max().item() == pytest.approx(bound, rel=1e-3)


def test_a_uniform_split_is_the_published_one():
    assert CHAIN.names[:11] == ["conv1", "bn1", "relu", "maxpool", *(f"layer{g}.{i}" for g, i in _published_half())]
    assert len(CHAIN.names) == 22


def _published_half():
    return [(1, i) for i in range(3)] + [(2, i) for i in range(4)]


def test_no_stage_writes_into_its_input():
    layers = CHAIN.skeleton()
    x = torch.empty(2, 3, 64, 64, device="meta")
    for name, layer in layers.items():
        x = x.detach().requires_grad_()  # as a stage receives it; torch refuses to overwrite it
        version = x._version
        y = layer(x)
        assert x._version == version, name
        x = y
    assert x.shape == (2, 1000)


def test_the_loss_is_squared_error_unless_cross_entropy_is_asked_for():
    assert isinstance(CHAIN.loss, OneHotSquaredError)
    assert isinstance(resnet50(loss="cross_entropy").loss, ClassCrossEntropy)
