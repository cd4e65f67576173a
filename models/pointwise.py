"""A 1x1 convolution that stays fast on CPUs in small micro-batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PointwiseConv2d(nn.Conv2d):
    """``nn.Conv2d`` with a 1x1 kernel and the same parameters under the same names.

    With one thread and fewer than 16 images torch's CPU convolution does not use oneDNN but a loop over images with a
    copy of each: half the speed, in exactly the micro-batches of a pipeline. A dilated one uses it (``use_mkldnn`` in
    aten/src/ATen/native/Convolution.cpp), and a kernel of one pixel has nothing to dilate. In bf16 with the channels
    innermost, one matrix product over all pixels is faster still.
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
            return super().forward(images)  # without oneDNN a dilated convolution is the slower one
        return F.conv2d(images, self.weight, self.bias, self.stride, dilation=2)
