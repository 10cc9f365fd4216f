"""Convolutions of channels-last tensors and their two gradients: by cuDNN, or as a matrix product where they are one.

    1x1, stride 1:   z [m, n] = x [m, k] @ w.T     dx = dz @ w     dw = dz.T @ x

Which of the two is faster depends on the shape (cuDNN in the wide layers of ResNet-50, cuBLAS in the deep ones), so it
is measured once per shape, under the same switch as cuDNN's own choice of algorithms: torch.backends.cudnn.benchmark.
Reference: torch.nn.functional.conv2d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hyperbatch.kernels.compile import is_compiling

ROUNDS = 3
_chosen: dict[tuple[Any, ...], int] = {}


def padded(images: Tensor) -> Tensor:
    """With a fourth channel of zeros, if there are three: cuDNN pads them anyway, at twice the price, in each call."""
    return functional.pad(images, (0, 0, 0, 0, 0, 1)) if images.shape[1] == 3 and images.is_cuda else images


def convolve(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """z = conv(x), without a bias. x may be `padded`."""
    w = _weight(x, conv)

    def by_cudnn() -> Tensor:
        return torch.ops.aten.convolution(
            x, w, None, conv.stride, conv.padding, conv.dilation, False, (0, 0), conv.groups
        )

    if not is_product(conv):
        return by_cudnn()
    return _faster("convolve", x, conv, by_cudnn, lambda: _image(torch.mm(rows(x), w.flatten(1).t()), x))


def input_gradient(dz: Tensor, x: Tensor, conv: nn.Conv2d) -> Tensor:
    """dx from dz."""

    def by_cudnn() -> Tensor:
        return _backward(dz, x, conv, (True, False, False))[0]

    if not is_product(conv):
        return by_cudnn()
    return _faster("input", x, conv, by_cudnn, lambda: _image(torch.mm(rows(dz), conv.weight.flatten(1)), x))


def read_pixels_gradient(dz: Tensor, conv: nn.Conv2d) -> Tensor:
    """The gradient of the pixels that a 1x1 convolution reads, those of its stride; the others' is zero."""
    return _image(torch.mm(rows(dz), conv.weight.flatten(1)), dz)


def weight_gradient(dz: Tensor, x: Tensor, conv: nn.Conv2d, out: Tensor | None) -> Tensor:
    """dw from dz: in `out` when a matrix product makes it, else where cuDNN puts it."""

    def by_cudnn() -> Tensor:
        dw = _backward(dz, x, conv, (False, True, False))[1]
        return dw if dw.shape == conv.weight.shape else dw[:, : conv.in_channels]

    def by_product() -> Tensor:
        dw = torch.empty_like(conv.weight) if out is None else out
        torch.mm(rows(dz).t(), rows(x), out=dw.flatten(1))
        return dw

    if not is_product(conv):
        return by_cudnn()
    return _faster("weight", x, conv, by_cudnn, by_product)


def is_product(conv: nn.Conv2d, stride: int = 1) -> bool:
    """Of the pixels it reads, with this stride."""
    return conv.kernel_size == (1, 1) and conv.stride == (stride,) * 2 and conv.padding == (0, 0) and conv.groups == 1


def rows(x: Tensor) -> Tensor:
    """A channels-last tensor as the matrix it is in memory."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _image(matrix: Tensor, like: Tensor) -> Tensor:
    """The matrix as a channels-last tensor with the pixels of `like`."""
    n, _, h, w = like.shape
    return matrix.view(n, h, w, matrix.shape[1]).permute(0, 3, 1, 2)


def _weight(x: Tensor, conv: nn.Conv2d) -> Tensor:
    missing = x.shape[1] - conv.in_channels
    return functional.pad(conv.weight, (0, 0, 0, 0, 0, missing)) if missing else conv.weight


def _backward(dz: Tensor, x: Tensor, conv: nn.Conv2d, wanted: tuple[bool, bool, bool]) -> tuple[Tensor, ...]:
    return torch.ops.aten.convolution_backward(
        dz, x, _weight(x, conv), None, conv.stride, conv.padding, conv.dilation, False, (0, 0), conv.groups, wanted
    )


def _faster(what: str, x: Tensor, conv: nn.Conv2d, *ways: Callable[[], Tensor]) -> Tensor:
    """The result of the way that was fastest for this shape; the last one where nothing may be measured."""
    key = (what, x.shape, conv.weight.shape, x.dtype, x.device)
    if key not in _chosen:
        if not (x.is_cuda and torch.backends.cudnn.benchmark) or torch.cuda.is_current_stream_capturing():
            return ways[-1]()
        if is_compiling():
            # The threads that compile would come between the two marks of a measurement. Each way once, so that cuDNN
            # makes its own trials meanwhile: it chooses by shape, and what lies in the tensors is no matter.
            for way in ways[:-1]:
                way()
            return ways[-1]()
        seconds = [_seconds(way) for way in ways]
        _chosen[key] = seconds.index(min(seconds))
    return ways[_chosen[key]]()


def _seconds(way: Callable[[], Tensor]) -> float:
    """The best of a few rounds, as cuDNN itself judges. Waits for the device: in the first step of a shape only."""
    best = float("inf")
    torch.cuda.synchronize()  # nothing else runs meanwhile, on any stream
    for _ in range(1 + ROUNDS):  # the first loads kernels and lets cuDNN choose
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        way()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best
