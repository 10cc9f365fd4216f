"""The means of 2x2 pixels in float64 by torch, and the kernel's beside them, on any device."""

from __future__ import annotations

import torch
from norm_reference import check_rounded, poisoned
from torch import Tensor
from torch.nn import functional as F


def make(n: int, c: int, h: int, w: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    random = torch.Generator(device).manual_seed(0)
    x = torch.randn(n, c, h, w, generator=random, device=device) + 0.5
    return x.to(dtype).to(memory_format=torch.channels_last)


def check(x: Tensor) -> None:
    from hyperbatch.kernels.average import average

    with poisoned():
        got = average(x)
    assert got.dtype == x.dtype
    check_rounded(got, F.avg_pool2d(x.double(), 2, ceil_mode=True), x.double().abs().max().item())
