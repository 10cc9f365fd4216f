"""Depthwise convolutions in float64 by torch, and the kernels' results beside them, on any device; a block with one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """As ConvNeXt has them."""

    def __init__(self, width):
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def make(n, c, h, w, side, *, dtype=torch.float16, device="cpu", seed=0):
    """x, dz, weight, bias. x away from mean 0."""
    generator = torch.Generator().manual_seed(seed)

    def images(shift):
        values = torch.randn(n, c, h, w, generator=generator) + shift
        return values.to(device, dtype).to(memory_format=torch.channels_last)

    weight = (torch.randn(c, 1, side, side, generator=generator) / side).to(device, dtype)
    return images(0.5), images(0.0), weight, torch.randn(c, generator=generator).to(device)


def reference(x, dz, weight, bias):
    """z, x + dx, dw, dbias in float64: x as the gradient of a shortcut."""
    wide = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    z = F.conv2d(*wide, padding=weight.shape[-1] // 2, groups=len(weight))
    dx, dw, dbias = torch.autograd.grad(z, wide, dz.double())
    return z.detach(), x + dx, dw, dbias


def through_kernels(x, dz, weight, bias, setting=None):
    """Everything that is allocated starts as nan."""
    from hyperbatch.kernels import depthwise

    setting = setting or depthwise.SETTINGS[-1]
    torch.use_deterministic_algorithms(True)
    try:
        z = depthwise.convolve(x, weight, bias, setting)
        total = depthwise.convolve(dz, weight, None, setting, flip=True, added=x)
        return z, total, *depthwise.weight_gradient(dz, x, weight)
    finally:
        torch.use_deterministic_algorithms(False)


def check(x, dz, weight, bias, setting=None):
    found = through_kernels(x, dz, weight, bias, setting)
    for got, expect in zip(found, reference(x, dz, weight, bias), strict=True):
        # Sums in fp32 of products that are exact there, then one rounding to the dtype; the interpreter cuts bf16 off.
        one_rounding = 1e-5 if got.dtype == torch.float32 else torch.finfo(x.dtype).eps
        torch.testing.assert_close(got.double(), expect, rtol=one_rounding, atol=1e-5 * expect.abs().max().item())
