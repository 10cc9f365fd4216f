"""Layers with 16-bit inputs and weights, and fp32 norm parameters and biases, as the arena stores them.

    16 bit  -> conv / linear (weight 16 bit, bias fp32) -> 16 bit -> norm (scale, shift, statistics fp32) -> 16 bit

If all dtypes are equal, each layer is the same as torch's layer of that name, with the same parameter names and maths.
`takes_fp32_parameters` tells the arena that norm parameters and biases may stay fp32 if the weights are 16-bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyperbatch import vocabulary
from hyperbatch.models.norm import BatchNorm2d

HALF_DTYPES = tuple(getattr(torch, name) for name in vocabulary.HALF_DTYPES)


def as_dtype(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


class Linear(nn.Linear):
    """Computes in the weight's dtype. A wider bias is rounded to it first; the sum is formed before the output is
    rounded."""

    takes_fp32_parameters = True

    def forward(self, input: Tensor) -> Tensor:
        dtype = self.weight.dtype
        return F.linear(input.to(dtype), self.weight, as_dtype(self.bias, dtype))


def with_constant_bias(layer: nn.Linear, input: Tensor) -> Tensor:
    """Returns a linear layer's output without a gradient for the bias, which the caller computes in another way."""
    dtype = layer.weight.dtype
    return F.linear(input.to(dtype), layer.weight, layer.bias.detach().to(dtype))


class Conv2d(nn.Conv2d):
    """Computes in the weight's dtype, like `Linear`."""

    takes_fp32_parameters = True

    def forward(self, input: Tensor) -> Tensor:
        dtype = self.weight.dtype
        if dtype in HALF_DTYPES and input.device.type == "cpu" and input.shape[-1] < self.stride[1]:
            # In bf16 on a CPU, the gradient of a kernel whose stride is larger than the width of the images contains
            # whatever was in memory at the places that no pixel reaches (torch 2.13).
            bias = as_dtype(self.bias, torch.float32)
            return self._conv_forward(input.float(), self.weight.float(), bias).to(dtype)
        return self._conv_forward(input.to(dtype), self.weight, as_dtype(self.bias, dtype))


class LayerNorm(nn.LayerNorm):
    """Computes in the dtype of its parameters and returns the input's."""

    takes_fp32_parameters = True

    def forward(self, input: Tensor) -> Tensor:
        dtype = input.dtype if self.weight is None else self.weight.dtype
        return F.layer_norm(input.to(dtype), self.normalized_shape, self.weight, self.bias, self.eps).to(input.dtype)


class GroupNorm(nn.GroupNorm):
    """Computes in the dtype of its parameters and returns the input's."""

    takes_fp32_parameters = True

    def forward(self, input: Tensor) -> Tensor:
        dtype = input.dtype if self.weight is None else self.weight.dtype
        return F.group_norm(input.to(dtype), self.num_groups, self.weight, self.bias, self.eps).to(input.dtype)


class DropPath(nn.Module):
    """Stochastic depth: in training, the branch is dropped for each sample with probability `rate`, and scaled up for
    the other samples.

    Forward reads the rate from a tensor, so that blocks that differ only in the rate share one compilation.
    """

    kept: Tensor | None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.set_rate(rate)

    def set_rate(self, rate: float) -> None:
        self.rate = rate
        self.register_buffer("kept", torch.tensor(1 - rate) if rate else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.kept is None:
            return x
        draws = torch.rand(len(x), *(1,) * (x.dim() - 1), dtype=self.kept.dtype, device=x.device)
        return x * ((draws < self.kept) / self.kept).to(x.dtype)


def to_logits(output: Tensor) -> Tensor:
    """Converts a model's output to fp32. An fp64 output stays fp64."""
    return output if output.dtype == torch.float64 else output.float()


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Runs the block with the whole model in evaluation mode and without gradients. Afterwards the mode of every module
    is restored: some parts of a model may never be in training mode, and some may override `train()`."""
    modes = {module: module.training for module in model.modules()}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        for module, mode in modes.items():
            module.training = mode


def to_channels_last(model: nn.Module) -> nn.Module:
    """Converts a model in place, like `Module.to(memory_format=...)`, which fails for parameters with five dimensions
    (Conv3d).

    `Tensor.contiguous` would not change the strides of 1x1 weights. They matter, because torch runs a convolution of
    1x1 pixels (squeeze-excite) in the layout of its weight: the layout of such pixels is ambiguous.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return model


_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.Conv2d: Conv2d,
    nn.LayerNorm: LayerNorm,
    nn.GroupNorm: GroupNorm,
    nn.BatchNorm2d: BatchNorm2d,
}


def adopt(model: nn.Module) -> nn.Module:
    """Turns plain torch layers of a foreign model into ours, in place. Subclasses keep their own forward.

    Our layers add nothing to the state dict, so changing the class does not change parameters, hooks and names.
    """
    for module in model.modules():
        ours = _OURS.get(type(module))
        if ours is not None:
            module.__class__ = ours
        elif type(module).__name__ == "DropPath" and getattr(module, "scale_by_keep", False):  # timm's
            rate = cast(float, module.drop_prob)
            module.__class__ = DropPath
            cast(DropPath, module).set_rate(rate)
    return model
