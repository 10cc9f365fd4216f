"""Depthwise convolutions that use our kernels where these are faster, in forward and backward, compiled or not.

DepthwiseConv2d -> torch.ops.hyperbatch.depthwise               one operation for torch.compile, capture and autograd
                       16 bit, on a GPU   the fastest of torch's convolution and `kernels.depthwise`, by shape
                       elsewhere          torch's convolution: the reference
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn import functional as F

from hyperbatch.kernels import has_triton
from hyperbatch.kernels.conv import by_fastest, channels_last
from hyperbatch.models.layers import HALF_DTYPES, Conv2d, as_dtype

SIDES = (3, 5, 7)  # filter sizes that the kernels support


class DepthwiseConv2d(Conv2d):
    """A convolution of each channel by itself, with a stride of 1 and an output of the same size as the input."""

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.dtype not in HALF_DTYPES or not input.is_cuda or input.dim() != 4:
            return super().forward(input)
        return torch.ops.hyperbatch.depthwise(input.to(self.weight.dtype), self.weight, self.bias)


def is_depthwise(module: nn.Module) -> bool:
    """Whether the module is exactly torch's convolution, or ours, and has settings that the kernels support."""
    if not isinstance(module, nn.Conv2d) or type(module) not in (nn.Conv2d, Conv2d):
        return False
    side = module.kernel_size[0]
    return (
        module.kernel_size in [(known, known) for known in SIDES]
        and module.groups == module.in_channels == module.out_channels
        and module.stride == module.dilation == (1, 1)
        and module.padding in ((side // 2, side // 2), "same")
        and module.padding_mode == "zeros"
    )


def depthwise_layers(model: nn.Module) -> list[DepthwiseConv2d]:
    """Returns one layer of each kind for which kernels are compiled, or none if the kernels cannot be used."""
    layers = [module for module in model.modules() if isinstance(module, DepthwiseConv2d)]
    kinds = {(layer.weight.shape, layer.weight.dtype): layer for layer in layers if _has_kernels(layer.weight)}
    return list(kinds.values())


def compile_depthwise(layers: list[DepthwiseConv2d]) -> None:
    """Launches every kernel variant that these layers may use, on very little data. Call it inside
    `kernels.compile.compiling`; otherwise the first step would compile the variants one after the other."""
    from hyperbatch.kernels import depthwise

    for layer in layers:
        weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        x = torch.empty((1, len(weight), 1, 1), dtype=weight.dtype, device=weight.device)
        for setting in depthwise.SETTINGS:
            depthwise.convolve(x, weight, bias, setting)
            depthwise.convolve(x, weight, None, setting, flip=True)
            depthwise.convolve(x, weight, None, setting, flip=True, added=x)
        depthwise.weight_gradient(x, x, weight)


# --- operations -------------------------------------------------------------------------------------------------------


@custom_op("hyperbatch::depthwise", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = channels_last(x)

    def by_torch() -> Tensor:
        rounded = as_dtype(bias, weight.dtype)
        return channels_last(F.conv2d(x, weight, rounded, padding=weight.shape[-1] // 2, groups=len(weight)))

    if not _has_kernels(x):
        return by_torch()
    from hyperbatch.kernels import depthwise

    ours = [partial(depthwise.convolve, x, weight, bias, setting) for setting in depthwise.SETTINGS]
    return by_fastest(f"depthwise {depthwise.SETTINGS}", x, weight, by_torch, *ours)


@custom_op(
    "hyperbatch::depthwise_input",
    mutates_args=(),
    schema="(Tensor dz, Tensor weight, Tensor? added=None) -> Tensor",
)
def input_gradient(dz: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    """added: another gradient of the same input, such as that of a shortcut (`models/depthwise_sums.py`)."""
    dz, added = channels_last(dz), None if added is None else channels_last(added)

    def by_torch() -> Tensor:
        dx = channels_last(_backward(dz, dz, weight, (True, False, False))[0])
        return dx if added is None else dx.add_(added)

    if not _has_kernels(dz):
        return by_torch()
    from hyperbatch.kernels import depthwise

    ours = [
        partial(depthwise.convolve, dz, weight, None, setting, flip=True, added=added) for setting in depthwise.SETTINGS
    ]
    what = "input" if added is None else "input sum"
    return by_fastest(f"depthwise {what} {depthwise.SETTINGS}", dz, weight, by_torch, *ours)


@custom_op(
    "hyperbatch::depthwise_weight",
    mutates_args=(),
    schema="(Tensor dz, Tensor x, Tensor weight, bool biased) -> (Tensor, Tensor)",
)
def weight_gradient(dz: Tensor, x: Tensor, weight: Tensor, biased: bool) -> tuple[Tensor, Tensor]:
    """Returns dw and the bias's gradient in fp32, which is empty if there is no bias."""
    dz, x = channels_last(dz), channels_last(x)

    def by_torch() -> tuple[Tensor, Tensor]:
        _, dw, dbias = _backward(dz, x, weight, (False, True, biased))
        return torch.empty_like(weight).copy_(dw), dbias.float() if biased else x.new_empty(0, dtype=torch.float32)

    if not _has_kernels(x):
        return by_torch()
    from hyperbatch.kernels import depthwise

    def by_kernels() -> tuple[Tensor, Tensor]:
        dw, dbias = depthwise.weight_gradient(dz, x, weight)
        return dw, dbias if biased else dbias.new_empty(0)

    return by_fastest(f"depthwise weight {depthwise.GRADIENT}", x, weight, by_torch, by_kernels)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF_DTYPES and has_triton()


def _backward(dz: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> tuple[Tensor, ...]:
    padding = (weight.shape[-1] // 2,) * 2
    bias_sizes, groups = [len(weight)], len(weight)
    return torch.ops.aten.convolution_backward(
        dz, x, weight, bias_sizes, (1, 1), padding, (1, 1), False, (0, 0), groups, wanted
    )


@convolve.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


@input_gradient.register_fake
def _(dz: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    return torch.empty_like(dz, memory_format=torch.channels_last)


@weight_gradient.register_fake
def _(dz: Tensor, x: Tensor, weight: Tensor, biased: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), x.new_empty(len(weight) if biased else 0, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx: Any, dz: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    dx = torch.ops.hyperbatch.depthwise_input(dz, weight) if of_x else None
    dw = dbias = None
    if of_weight or of_bias:
        dw, dbias = torch.ops.hyperbatch.depthwise_weight(dz, x, weight, of_bias)
        dw, dbias = dw if of_weight else None, dbias.to(ctx.bias_dtype) if of_bias else None
    return dx, dw, dbias


convolve.register_autograd(_gradients, setup_context=_keep)
