"""The blur and its gradient in float64 by torch, and the kernels' beside them, on any device."""

from __future__ import annotations

import torch
from average_reference import make
from norm_reference import check_rounded, poisoned
from torch import Tensor

from hyperbatch.models import blur as models

__all__ = ["check", "make"]


def check(x: Tensor, stride: int) -> None:
    from hyperbatch.kernels.blur import blur, blur_gradient

    exact = x.double().requires_grad_()
    want = models.blur(exact, stride)
    dy = make(*want.shape, x.dtype, str(x.device))
    (want_gradient,) = torch.autograd.grad(want, exact, dy.double())
    with poisoned():
        got, gradient = blur(x, stride), blur_gradient(dy, *x.shape[2:], stride)
    assert got.dtype == gradient.dtype == x.dtype
    assert gradient.shape == x.shape
    check_rounded(got, want.detach(), x.double().abs().max().item())
    check_rounded(gradient, want_gradient, dy.double().abs().max().item())
