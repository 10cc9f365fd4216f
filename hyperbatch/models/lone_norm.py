"""Layer norms between compiled blocks, with the kernels of `models/residual.py` but without a sum.

    LayerNorm      rows -> norm -> rows                             after the last block of a transformer
    LayerNorm2d    NCHW -> [pixels, channels] -> norm -> NCHW       timm's; no copy where images are channels-last

Torch's own kernels use a block of threads per row, which is slow for the few channels of ConvNeXt's first stage. Norms
inside compiled regions are not replaced, because inductor fuses them with their neighbours. Reference: the layers' own
forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hyperbatch.models.gelu import FEW_ROWS
from hyperbatch.models.residual import add_norm_backward, by_kernels, norm


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        n, mean, rstd = norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return n

    @staticmethod
    def backward(ctx: Any, dn: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        d, sums = add_norm_backward(None, dn, x, weight, mean, rstd)
        return d, sums[0], sums[1], None


def norm_rows(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    """Returns the layer's norm over the last dimension, in the dtype of x."""
    return _Norm.apply(x, layer.weight, layer.bias, layer.eps)


@functools.cache
def quick_norm(layer: type[nn.Module], *, images: bool) -> type[nn.Module]:
    """Returns a layer norm class with another forward. images: normalises the second dimension instead of the last."""

    def forward(self: Any, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1) if images else x
        if not by_kernels(rows):
            return layer.forward(self, x)
        n = norm_rows(rows, self)
        return n.permute(0, 3, 1, 2) if images else n

    return type(f"Quick{layer.__name__}", (layer,), {"forward": forward, "is_lone": True, "__module__": __name__})


def is_lone_norm(module: nn.Module) -> bool:
    return getattr(type(module), "is_lone", False)


def compile_lone_norms(layers: Iterable[Any], dtype: torch.dtype) -> None:
    """Launches each variant of the kernels once, on a few rows. Call it inside `kernels.compile.compiling`."""
    from hyperbatch.kernels import add_norm

    variants = {(layer.weight.shape, layer.weight.dtype, layer.bias.dtype): layer for layer in layers}
    for layer in variants.values():
        x = torch.empty(FEW_ROWS, *layer.normalized_shape, dtype=dtype, device=layer.weight.device)
        if add_norm.takes(x):
            _, _, mean, rstd = add_norm.forward(x, None, layer.weight, layer.bias, layer.eps)
            add_norm.backward(None, x, x, layer.weight, mean, rstd)
