"""ResNet-50: how its weights start, its published split, its loss; and its convolutions of one pixel, which give what
nn.Conv2d gives, whatever the number of images, their memory format and precision."""

import math

import pytest
import torch
from torch import nn

from models.batchnorm import BatchNorm2d
from models.losses import ClassCrossEntropy, OneHotSquaredError
from models.resnet50 import PointwiseConv2d, resnet50

CPU = torch.device("cpu")
CHAIN = resnet50()


def test_weights_start_as_torchvision_s():
    layers = CHAIN.build(CHAIN.names, 1, CPU)
    for name, module in layers.named_modules():
        if isinstance(module, nn.Conv2d):
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
    blocks = ["layer1.0", "layer1.1", "layer1.2", "layer2.0", "layer2.1", "layer2.2", "layer2.3"]
    assert CHAIN.names[:11] == ["conv1", "bn1", "relu", "maxpool", *blocks]
    assert len(CHAIN.names) == 22


def test_the_loss_is_squared_error_unless_cross_entropy_is_asked_for():
    assert isinstance(CHAIN.loss, OneHotSquaredError)
    assert isinstance(resnet50(loss="cross_entropy").loss, ClassCrossEntropy)


# -- convolutions of one pixel -----------------------------------------------------------------------------------------


def passed(layer, images):
    """Output, and gradients of the input and of the parameters."""
    images = images.clone(memory_format=torch.preserve_format).requires_grad_()
    output = layer(images)
    output.square().sum().backward()
    return [output, images.grad, *(parameter.grad for parameter in layer.parameters())]


def alike(images, bias, dtype=torch.float64, stride=1):
    torch.manual_seed(1)
    ours, torchs = PointwiseConv2d(5, 7, bias, stride), nn.Conv2d(5, 7, 1, stride, bias=bias)
    torchs.load_state_dict(ours.state_dict())
    return passed(ours.to(dtype), images.to(dtype)), passed(torchs.to(dtype), images.to(dtype))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("count", [1, 15, 16])
def test_outputs_and_gradients_are_those_of_a_convolution(count, stride, dtype, memory_format):
    images = torch.randn(count, 5, 7, 4).to(memory_format=memory_format)
    for bias in (True, False):
        for ours, theirs in zip(*alike(images, bias, dtype, stride), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_images_of_one_pixel_are_images_too():
    for ours, theirs in zip(*alike(torch.randn(3, 5, 1, 1), bias=True), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_channels_stay_innermost():
    images = torch.randn(3, 5, 6, 4).to(memory_format=torch.channels_last)
    assert PointwiseConv2d(5, 7)(images).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("stride", [1, 2])
def test_bf16_stays_within_its_rounding(stride, memory_format):
    images = torch.randn(3, 5, 6, 4).to(memory_format=memory_format)
    layer = PointwiseConv2d(5, 7, stride=stride)
    exact = layer(images)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = layer(images)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=2e-2, atol=2e-2)
