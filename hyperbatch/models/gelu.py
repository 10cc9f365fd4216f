"""A linear layer and the GELU behind it: the product without its bias, then bias and activation in one kernel.

    forward     z = x @ w.T     y = gelu(z + b)                       kernels/gelu.py
    backward    dz = dy * gelu'(z + b), db = its column sums          one pass; the two products are torch's own

`bias_gelu` is registered with torch, so that compiled code, autograd and CUDA graphs take it as it is. On a CPU, in
other precisions and without Triton it runs torch's own operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hyperbatch.kernels import has_triton, interpreted
from hyperbatch.models.layers import Linear

_FORMS = {False: "none", True: "tanh"}


@torch.library.custom_op("hyperbatch::bias_gelu", mutates_args=())
def bias_gelu(z: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """gelu(z + bias), of the last dimension's size. tanh: in the form that takes it for the normal distribution."""
    if _by_kernels(z):
        from hyperbatch.kernels import gelu

        return gelu.forward(z.contiguous(), bias, tanh)
    wide = _sum(z, bias)
    return F.gelu(wide, approximate=_FORMS[tanh]).to(z.dtype)


@torch.library.custom_op("hyperbatch::bias_gelu_backward", mutates_args=())
def bias_gelu_backward(dy: Tensor, z: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """(gradient of z, of the bias); the second in fp32 or wider."""
    if _by_kernels(z):
        from hyperbatch.kernels import gelu

        return gelu.backward(dy.contiguous(), z.contiguous(), bias, tanh)
    wide = _sum(z, bias)
    gradient = torch.ops.aten.gelu_backward(dy.to(wide.dtype), wide, approximate=_FORMS[tanh])
    return gradient.to(z.dtype).contiguous(), gradient.flatten(0, -2).sum(0)


@bias_gelu.register_fake
def _(z: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


@bias_gelu_backward.register_fake
def _(dy: Tensor, z: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(z.dtype, torch.float32)
    return torch.empty_like(z, memory_format=torch.contiguous_format), bias.new_empty(bias.shape, dtype=wide)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    z, bias, ctx.tanh = inputs
    ctx.save_for_backward(z, bias)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    z, bias = ctx.saved_tensors
    dz, total = bias_gelu_backward(dy, z, bias, ctx.tanh)
    return dz, total.to(bias.dtype), None


bias_gelu.register_autograd(_gradients, setup_context=_keep)


def _by_kernels(z: Tensor) -> bool:
    if not (has_triton() and (z.is_cuda or interpreted())):
        return False
    from hyperbatch.kernels import gelu

    return gelu.takes(z)


def _sum(z: Tensor, bias: Tensor) -> Tensor:
    """In fp32 or wider, as the kernels have it."""
    wide = torch.promote_types(z.dtype, torch.float32)
    return z.to(wide) + bias.to(wide)


class LinearGelu(Linear):
    """gelu(linear(x)); in the place of the linear layer, with its parameters. Whoever calls it skips the GELU."""

    tanh: bool

    def forward(self, input: Tensor) -> Tensor:
        return bias_gelu(F.linear(input.to(self.weight.dtype), self.weight), self.bias, self.tanh)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gelu={_FORMS[self.tanh]}"
