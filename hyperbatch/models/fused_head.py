"""The mean over pixels and the linear layer at the end of a fused network. The gradient remains one value per image and
channel, which the previous block spreads over the pixels. Reference: fc(x.mean((2, 3))).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyperbatch.models.fused_blocks import new_grad


class MeanOfPixels(torch.autograd.Function):
    """x.mean((2, 3)), whose gradient remains one value per image and channel, for the previous block to spread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.mean((2, 3))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        n, c, h, w = ctx.shape
        return (dy / (h * w)).view(n, c, 1, 1).expand(ctx.shape)


class Classify(torch.autograd.Function):
    """fc(x.mean((2, 3))) in few kernels. An fp32 bias is not rounded, and makes the logits fp32. The product that
    computes the gradient of x also divides it by the number of pixels. The gradient remains one value per image and
    channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean = x.mean((2, 3))
        ctx.save_for_backward(mean, weight, bias)
        ctx.shape = x.shape
        return torch.mm(mean, weight.t()) + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        mean, weight, bias = ctx.saved_tensors
        n, c, h, w = ctx.shape
        db = torch.sum(dy, 0, out=new_grad(bias))
        dy = dy.to(weight.dtype)
        dw = torch.mm(dy.t(), mean, out=new_grad(weight))
        dx = torch.addmm(mean, dy, weight, beta=0, alpha=1 / (h * w))  # beta=0: only the shape of the mean is used
        return dx.view(n, c, 1, 1).expand(ctx.shape), dw, db
