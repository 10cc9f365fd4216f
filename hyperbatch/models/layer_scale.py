"""A linear layer followed by a layer scale, as in ConvNeXt's blocks, whose backward does not need the layer's output.

    forward     y = g * (x @ w.T + b)                    g: a factor for each column
    backward    G = dy.T @ x                             in fp32, [columns, inputs]: small
                dw = g * G      db = g * total      dg = sum of w * G + b * total      total: column sums of dy

Autograd would save x @ w.T + b for the gradient of g, which is a twelfth of what a ConvNeXt block saves for backward.
The sum over rows of dy * (x @ w.T) equals the sum over inputs of w * G, and the gradient of w needs G anyway. G is
wider than the gradients, because without the factor g, which starts at 1e-6, it would exceed fp16's range. Reference:
the block's own forward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyperbatch.models.layers import as_dtype
from hyperbatch.models.lone_norm import norm_rows


@torch.library.custom_op("hyperbatch::product_of_columns", mutates_args=())
def product_of_columns(a: Tensor, b: Tensor) -> Tensor:
    """Returns a.T @ b of two matrices with the same number of rows, in fp32 or wider."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a.t(), b, out_dtype=wide)
    return a.t().to(wide) @ b.to(wide)


@product_of_columns.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[1], b.shape[1], dtype=torch.promote_types(a.dtype, torch.float32))


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias, scale)
        return F.linear(x, weight, as_dtype(bias, weight.dtype)) * scale

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, weight, bias, scale = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        products = product_of_columns(rows, x.flatten(0, -2))
        wide = products.dtype
        total, factors = rows.sum(0, dtype=wide), scale.to(wide)
        dx = (dy * scale) @ weight
        dw = factors[:, None] * products
        dscale = (weight.to(wide) * products).sum(1) + bias.to(wide) * total
        return dx, dw.to(weight.dtype), (factors * total).to(bias.dtype), dscale.to(scale.dtype)


def scaled_linear(x: Tensor, layer: nn.Linear, scale: Tensor) -> Tensor:
    """Returns layer(x) * scale. The layer's weight and the scale have the same dtype, which is used for the
    computation."""
    return _ScaledLinear.apply(x.to(layer.weight.dtype), layer.weight, layer.bias, scale)


@functools.cache
def quick_convnext_block(block: type[nn.Module]) -> type[nn.Module]:
    """Returns timm's ConvNeXt block class with another forward. Its norm uses our kernels, even in compiled code,
    because inductor computes the gradients of scale and shift as partial sums and adds them up in a separate launch for
    each."""

    def forward(self: Any, x: Tensor) -> Tensor:
        mlp, scale = self.mlp, self.gamma
        if scale.dtype != mlp.fc2.weight.dtype:
            return block.forward(self, x)
        y = norm_rows(self.conv_dw(x).permute(0, 2, 3, 1), self.norm)
        y = mlp.norm(mlp.drop1(mlp.act(mlp.fc1(y))))
        y = mlp.drop2(scaled_linear(y, mlp.fc2, scale)).permute(0, 3, 1, 2)
        return self.drop_path(y) + self.shortcut(x)

    return type(f"Quick{block.__name__}", (block,), {"forward": forward, "__module__": __name__})
