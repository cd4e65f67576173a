"""A 1x1 convolution that stays fast on CPUs in small micro-batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ENOUGH_IMAGES = 16


class PointwiseConv2d(nn.Conv2d):
    """``nn.Conv2d`` with a 1x1 kernel: [b, in, h, w] -> [b, out, h, w], the same parameters under the same names.

    With one thread and fewer than 16 images torch's CPU convolution leaves oneDNN for a loop over images with a copy
    of each (``use_mkldnn`` in aten/src/ATen/native/Convolution.cpp): two thirds of the speed, in exactly the
    micro-batches of a pipeline. To this kernel it is all the same where an image ends, so their rows are counted as
    images then. In bf16 one matrix product over all pixels is faster still.
    """

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, kernel_size=1, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        if images.device.type != "cpu" or not images.is_contiguous(memory_format=torch.channels_last):
            return super().forward(images)
        if torch.is_autocast_enabled("cpu") or images.dtype == torch.bfloat16:
            return F.linear(images.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
        b, _, h, w = images.shape
        if b >= _ENOUGH_IMAGES:
            return super().forward(images)
        rows = images.permute(0, 2, 3, 1).reshape(b * h, 1, w, -1).permute(0, 3, 1, 2)
        return super().forward(rows).permute(0, 2, 3, 1).reshape(b, h, w, -1).permute(0, 3, 1, 2)
