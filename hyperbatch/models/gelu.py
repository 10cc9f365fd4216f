"""A linear layer followed by a GELU, whose backward computes the gradient of the layer's bias in the same pass.

    forward     h = x @ w.T + b     y = gelu(h)                      kernels/gelu.py
    backward    dh = dy * gelu'(h), db = its column sums             one pass; the two products are torch's own

`gelu` is registered with torch, so that it works in compiled code, autograd and CUDA graphs. On a CPU, in other
precisions and without Triton, it runs torch's own operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hyperbatch.kernels import has_triton, interpreted
from hyperbatch.models.layers import Linear, with_constant_bias

FEW_ROWS = 16  # number of rows in a launch that only compiles the kernel
_FORMS = {False: "none", True: "tanh"}

# Torch's caches of compiled code identify operations by name. If the gradient of an operation changes, rename it.


@torch.library.custom_op("hyperbatch::gelu", mutates_args=())
def gelu(h: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """Returns gelu(h). `bias` was the last summand of h; its gradient is computed here and must not be computed
    elsewhere.

    tanh: use the tanh approximation of the normal distribution.
    """
    if by_kernels(h):
        from hyperbatch.kernels import gelu

        return gelu.forward(h.contiguous(), tanh)
    return F.gelu(h, approximate=_FORMS[tanh]).contiguous()


@torch.library.custom_op("hyperbatch::gelu_backward", mutates_args=())
def gelu_backward(dy: Tensor, h: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Returns (gradient of h, gradient of the bias); the second is in fp32 or wider."""
    if by_kernels(h):
        from hyperbatch.kernels import gelu

        return gelu.backward(dy.contiguous(), h.contiguous(), tanh)
    wide = torch.promote_types(h.dtype, torch.float32)
    gradient = torch.ops.aten.gelu_backward(dy.to(wide), h.to(wide), approximate=_FORMS[tanh])
    return gradient.to(h.dtype).contiguous(), gradient.flatten(0, -2).sum(0)


@gelu.register_fake
def _(h: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    return torch.empty_like(h, memory_format=torch.contiguous_format)


@gelu_backward.register_fake
def _(dy: Tensor, h: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(h.dtype, torch.float32)
    return torch.empty_like(h, memory_format=torch.contiguous_format), h.new_empty(h.shape[-1], dtype=wide)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    h, bias, ctx.tanh = inputs
    ctx.save_for_backward(h)
    ctx.dtype = bias.dtype


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    (h,) = ctx.saved_tensors
    dh, total = gelu_backward(dy, h, ctx.tanh)
    return dh, total.to(ctx.dtype), None


gelu.register_autograd(_gradients, setup_context=_keep)


def by_kernels(h: Tensor) -> bool:
    """Whether our kernels can process this tensor, here and in `models.heads`."""
    if not (has_triton() and (h.is_cuda or interpreted())):
        return False
    from hyperbatch.kernels import gelu

    return gelu.takes(h)


class LinearGelu(Linear):
    """gelu(linear(x)). It replaces a linear layer and has its parameters; the module that calls it must skip the
    GELU."""

    tanh: bool

    def forward(self, input: Tensor) -> Tensor:
        return gelu(with_constant_bias(self, input), self.bias, self.tanh)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gelu={_FORMS[self.tanh]}"


def compile_gelus(layers: Iterable[LinearGelu], dtype: torch.dtype) -> None:
    """Launches each variant of the kernels once, on a few rows. Call it inside `kernels.compile.compiling`."""
    from hyperbatch.kernels import gelu

    for device, columns, tanh in {(layer.weight.device, layer.out_features, layer.tanh) for layer in layers}:
        h = torch.empty(FEW_ROWS, columns, dtype=dtype, device=device)
        if gelu.takes(h):
            gelu.forward(h, tanh)
            gelu.backward(h, h, tanh)
