"""Batch norm + ReLU + max-pool in float64 by torch, and the kernels' results beside it, on any device."""

from __future__ import annotations

import torch
from torch.nn import functional as F

EPS = 1e-5
RESNET = {"kernel": 3, "stride": 2, "padding": 1}
ALEXNET = {"kernel": 3, "stride": 2, "padding": 0}


def make(n, c, h, w, dtype=torch.float16, device="cpu", seed=0):
    """x away from mean 0; weights of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, c, h, w, generator=generator) * 2 + 0.7).to(dtype).to(memory_format=torch.channels_last)
    weight, bias = torch.randn(c, generator=generator), torch.randn(c, generator=generator) / 2
    return x.to(device), weight.to(device), bias.to(device)


def reference(x, weight, bias, window, dpooled=None):
    """pooled, torch's taps (255 where the ReLU cut off), coef; with dpooled also dx, dweight, dbias; in float64."""
    x, weight, bias = (t.double().requires_grad_() for t in (x, weight, bias))
    k, stride, padding = window.values()
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    rstd = (var + EPS).rsqrt()
    coef = torch.stack([mean, rstd, weight * rstd, bias - mean * weight * rstd]).detach().float()
    y = (x - mean.view(1, -1, 1, 1)) * (rstd * weight).view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
    pooled, at = F.max_pool2d(y.relu(), k, stride, padding, return_indices=True)
    row = at // x.shape[3] + padding - stride * torch.arange(at.shape[2], device=at.device).view(-1, 1)
    column = at % x.shape[3] + padding - stride * torch.arange(at.shape[3], device=at.device)
    tap = torch.where(pooled > 0, row * k + column, 255).to(torch.uint8)
    grads = () if dpooled is None else torch.autograd.grad(pooled, (x, weight, bias), dpooled.double())
    return pooled.detach(), tap, coef, grads


def through_kernels(x, coef, window, dpooled, local=False):
    """Everything that is allocated starts as nan, or 255."""
    from hyperbatch.kernels import norm
    from hyperbatch.kernels.norm import pool

    counters = norm.new_counters(x.device)
    torch.use_deterministic_algorithms(True)
    try:
        back, weight, bias = torch.empty(5, x.shape[1], device=x.device).split([3, 1, 1])
        grads = norm.NormGradients(back, weight[0], bias[0], local=local)
        pooled, peaks = pool.normalise_pool(x, coef, **window)
        pool.reduce_pool_gradient(dpooled, peaks, x, coef, grads, counters)
        dx = None if local else pool.apply_pool_gradient(dpooled, peaks, x, grads.back, **window)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not counters.any()
    return pooled, peaks, dx, grads


def check(x, weight, bias, window):
    shape = reference(x, weight, bias, window)[0].shape
    dpooled = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(x)
    dpooled = dpooled.to(memory_format=torch.channels_last)
    expect, tap, coef, (dx, dweight, dbias) = reference(x, weight, bias, window, dpooled)
    pooled, peaks, measured, grads = through_kernels(x, coef, window, dpooled)
    # One rounding to the dtype of what fp32 computed from terms of about this size; the interpreter cuts bf16 off.
    one_rounding = torch.finfo(x.dtype).eps
    torch.testing.assert_close(pooled.double(), expect, rtol=one_rounding, atol=1e-5)
    assert torch.equal(peaks.tap, tap)
    assert measured is not None
    torch.testing.assert_close(measured.double(), dx, rtol=one_rounding, atol=1e-6 + 1e-5 * dx.abs().max().item())
    # Sums in fp32 of exact inputs.
    torch.testing.assert_close(grads.weight.double(), dweight, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(grads.bias.double(), dbias, rtol=1e-5, atol=1e-4)
