"""1x1 convolutions, each of whose three products is computed by the faster of cuDNN and cuBLAS for its shape.

PointwiseConv2d -> torch.ops.hyperbatch.pointwise               one operation for torch.compile, capture and autograd
                       16 bit, on a GPU   the faster of torch's convolution and of a matrix product of pixels, by shape
                       elsewhere          torch's convolution: the reference

Inductor always uses cuDNN, even in a squeeze-excite, whose images are one pixel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn import functional as F

from hyperbatch.kernels.conv import by_fastest, channels_last, is_product, rows
from hyperbatch.models.layers import HALF_DTYPES, Conv2d, as_dtype


class PointwiseConv2d(Conv2d):
    """A 1x1 convolution with a stride of 1."""

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.dtype not in HALF_DTYPES or not input.is_cuda or input.dim() != 4:
            return super().forward(input)
        return torch.ops.hyperbatch.pointwise(input.to(self.weight.dtype), self.weight, self.bias)


def is_pointwise(module: nn.Module) -> bool:
    """Whether the module is exactly torch's convolution, or ours, with a 1x1 filter."""
    return isinstance(module, nn.Conv2d) and type(module) in (nn.Conv2d, Conv2d) and is_product(module)


# --- operations -------------------------------------------------------------------------------------------------------


@custom_op("hyperbatch::pointwise", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, bias = channels_last(x), as_dtype(bias, weight.dtype)
    return by_fastest(
        "pointwise" if bias is None else "pointwise and bias",
        x,
        weight,
        lambda: channels_last(F.conv2d(x, weight, bias)),
        lambda: _product(x, weight.flatten(1).t(), bias),
    )


@custom_op("hyperbatch::pointwise_input", mutates_args=(), schema="(Tensor dz, Tensor x, Tensor weight) -> Tensor")
def input_gradient(dz: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    dz, x = channels_last(dz), channels_last(x)
    return by_fastest(
        "pointwise input",
        dz,
        weight,
        lambda: channels_last(_backward(dz, x, weight, (True, False, False))[0]),
        lambda: _product(dz, weight.flatten(1)),
    )


@custom_op("hyperbatch::pointwise_weight", mutates_args=(), schema="(Tensor dz, Tensor x, Tensor weight) -> Tensor")
def weight_gradient(dz: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    dz, x = channels_last(dz), channels_last(x)

    def by_product() -> Tensor:
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
        torch.mm(rows(dz).t(), rows(x), out=dw.flatten(1))
        return dw

    def by_cudnn() -> Tensor:
        return _backward(dz, x, weight, (False, True, False))[1].contiguous()

    return by_fastest("pointwise weight", x, weight, by_cudnn, by_product)


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies each pixel of x by the matrix. The result is not a view, because an activation may change it in
    place."""
    y = _images(x, matrix.shape[1])
    if bias is None:
        torch.mm(rows(x), matrix, out=rows(y))
    else:
        torch.addmm(bias, rows(x), matrix, out=rows(y))
    return y


def _backward(dz: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> tuple[Tensor, ...]:
    return torch.ops.aten.convolution_backward(dz, x, weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, wanted)


@convolve.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _images(x, len(weight))


@input_gradient.register_fake
def _(dz: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return _images(dz, weight.shape[1])


@weight_gradient.register_fake
def _(dz: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _images(x: Tensor, channels: int) -> Tensor:
    size = (len(x), channels, *x.shape[2:])
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx: Any, dz: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    wide = torch.promote_types(dz.dtype, torch.float32)
    dx = torch.ops.hyperbatch.pointwise_input(dz, x, weight) if of_x else None
    dw = torch.ops.hyperbatch.pointwise_weight(dz, x, weight) if of_weight else None
    return dx, dw, dz.sum((0, 2, 3), dtype=wide).to(ctx.bias_dtype) if of_bias else None


convolve.register_autograd(_gradients, setup_context=_keep)
