"""Down-sampling that blurs first, so that the result hardly changes when the image is shifted by a pixel.

    strided convolution    blur, then the convolution with its stride
    max-pool               maximum with a stride of 1, then the blur with the pool's stride

The blur is the fixed filter [1 2 1] x [1 2 1] / 16 in each channel, with zeros outside the image (Zhang, arXiv
1904.11486; the order is that of MosaicML's composer). Nothing is added to the state dict, so weights fit models with
and without it.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def blur(x: Tensor, stride: int = 1) -> Tensor:
    """Blurs an image. [1 2 1] is [1 1] applied twice, so the blur is two means over 2x2 pixels, the first of which
    reads the zeros outside.

    The zeros are added by `pad`, because with `padding` torch's gradient is wrong on CUDA for channels-last tensors
    (pytorch issue 188344).
    """
    return F.avg_pool2d(F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 2, stride=1), 2, stride=stride)


class BlurConv2d(nn.Conv2d):
    """A strided convolution of a blurred input. A 1x1 convolution does not need the pixels that its stride skips, so
    its blur takes over the stride."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int, padding: int, bias: bool) -> None:
        blur_stride = stride if (kernel, padding) == (1, 0) else 1
        super().__init__(inputs, outputs, kernel, stride=stride // blur_stride, padding=padding, bias=bias)
        self.blur_stride = blur_stride

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(blur(input, self.blur_stride))


class BlurMaxPool2d(nn.MaxPool2d):
    """A max-pool whose maxima are blurred before they are subsampled."""

    def forward(self, input: Tensor) -> Tensor:
        assert isinstance(self.stride, int)
        return blur(F.max_pool2d(input, self.kernel_size, stride=1, padding=self.padding), self.stride)
