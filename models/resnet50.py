"""ResNet-50 as a chain of its blocks.

Source: He et al. 2015, "Deep Residual Learning for Image Recognition", in torchvision's variant (the stride is in a
block's 3x3 convolution). Layers have torchvision's names, so each model can load the other's ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batchnorm import BatchNorm2d
from models.chain import Chain, LayerSpec, check_sizes, reset_parameters
from models.losses import ClassCrossEntropy, Loss, OneHotSquaredError

# For each group of blocks: the number of blocks, the width of their 3x3 convolution, the stride of the first block.
GROUPS = {"layer1": (3, 64, 1), "layer2": (4, 128, 2), "layer3": (6, 256, 2), "layer4": (3, 512, 2)}
LOSSES: dict[str, Callable[[], Loss]] = {"mse": OneHotSquaredError, "cross_entropy": ClassCrossEntropy}


def resnet50(
    in_channels: int = 3,
    num_classes: int = 1000,
    loss: Literal["mse", "cross_entropy"] = "mse",
    channels_last: bool = True,
) -> Chain:
    """Build a chain of 22 layers: four of the stem, 16 bottleneck blocks, pooling and the classifier.

    Images [b, in_channels, height, width] of any size (32 pixels or more are useful) -> logits [b, num_classes]. In
    training, a micro-batch of one image needs more than 32 pixels, because a single value has no variance in BatchNorm.

    The published experiment is PyTorch's tutorial on model parallelism. ``parallel.balance=[11,11]`` with squared error
    to the one-hot class (``loss="mse"``) gives its two halves (up to layer2, from layer3 on).
    """
    check_sizes(in_channels=in_channels, num_classes=num_classes)
    return Chain(
        layers=[
            LayerSpec("conv1", partial(nn.Conv2d, in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)),
            LayerSpec("bn1", partial(BatchNorm2d, 64)),
            # Not in place, unlike torchvision's: this may be a stage's first layer, which must not change its input.
            LayerSpec("relu", nn.ReLU),
            LayerSpec("maxpool", partial(nn.MaxPool2d, kernel_size=3, stride=2, padding=1)),
            *_blocks(),
            LayerSpec("avgpool", lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())),
            LayerSpec("fc", partial(nn.Linear, 2048, num_classes)),
        ],
        loss=LOSSES[loss](),
        initialise=initialise,
        limits={"channels": in_channels, "classes": num_classes},
        channels_last=channels_last,
    )


class PointwiseConv2d(nn.Conv2d):
    """``nn.Conv2d`` with a 1x1 kernel and the same parameters under the same names.

    With one thread and fewer than 16 images, torch's CPU convolution does not use oneDNN. It loops over the images and
    copies each, which halves the speed of a pipeline's micro-batches. A dilated convolution uses oneDNN (``use_mkldnn``
    in aten/src/ATen/native/Convolution.cpp), and dilation does not change a kernel of one pixel. In bf16 with the
    channels innermost, one matrix product over all pixels is faster still.
    """

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel_size=1, stride=stride, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        """[b, in_channels, h, w] -> [b, out_channels, h / stride, w / stride], rounded up."""
        if images.device.type != "cpu" or torch.compiler.is_exporting():
            return super().forward(images)
        if torch.is_autocast_enabled("cpu") or images.dtype == torch.bfloat16:
            if self.stride != (1, 1) or not images.is_contiguous(memory_format=torch.channels_last):
                return super().forward(images)
            return F.linear(images.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
        if images.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
            return super().forward(images)  # without oneDNN the dilated convolution is slower
        return F.conv2d(images, self.weight, self.bias, self.stride, dilation=2)


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1 pixels around a shortcut, [b, channels, h, w] -> [b, 4 * width, ...]."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = PointwiseConv2d(channels, width, bias=False), BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = BatchNorm2d(width)
        self.conv3, self.bn3 = PointwiseConv2d(width, 4 * width, bias=False), BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if channels != 4 * width or stride != 1:
            shortcut = PointwiseConv2d(channels, 4 * width, bias=False, stride=stride)
            self.downsample = nn.Sequential(shortcut, BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """[b, channels, h, w] -> [b, 4 * width, h / stride, w / stride]."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def initialise(name: str, module: nn.Module) -> None:
    """Set initial weights as torchvision does: normal by fan-out in convolutions, torch's default elsewhere."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    else:
        reset_parameters(name, module)


def _blocks() -> list[LayerSpec]:
    layers, channels = [], 64
    for group, (blocks, width, stride) in GROUPS.items():
        layers.append(LayerSpec(f"{group}.0", partial(Bottleneck, channels, width, stride)))
        channels = 4 * width
        further = partial(Bottleneck, channels, width, 1)
        layers += [LayerSpec(f"{group}.{i}", further) for i in range(1, blocks)]
    return layers
