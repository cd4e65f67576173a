"""PointwiseConv2d gives what nn.Conv2d gives, whatever the number of images, their memory format and precision."""

import pytest
import torch
from torch import nn

from models.resnet50 import PointwiseConv2d


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
