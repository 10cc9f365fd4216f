"""Max-pool, batch norm and a smooth activation in float64 by torch, and the kernels of `norm.unit` beside it."""

from __future__ import annotations

import torch
from norm_reference import FP32, ROUND_OFF, SMALLEST
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS = {"silu": (F.silu, 0), "gelu": (F.gelu, 1)}


def make(n, c, h, w, *, dtype=torch.float16, device="cpu", seed=0):
    """z away from mean 0, and a norm on its way."""
    random = torch.Generator().manual_seed(seed)
    z = (torch.randn(n, c, h, w, generator=random) * 2 + 0.7).to(dtype).to(memory_format=torch.channels_last)
    norm = nn.BatchNorm2d(c)
    with torch.no_grad():
        norm.weight.normal_(generator=random)
        norm.bias.normal_(generator=random)
        norm.running_mean.normal_(generator=random)
        norm.running_var.uniform_(0.5, 2, generator=random)
    return z.to(device), norm.to(device)


def reference(z: Tensor, norm: nn.BatchNorm2d, act, dy: Tensor | None = None, *, pooled: bool):
    """In float64: p, its taps, y; with dy also dz, dweight, dbias; and the running statistics afterwards."""
    norm64 = nn.BatchNorm2d(norm.num_features, eps=norm.eps, momentum=norm.momentum).to(z.device).double()
    norm64.load_state_dict(norm.state_dict())
    z = z.double().requires_grad_()
    p, tap = z, None
    if pooled:
        p, at = F.max_pool2d(z, 2, return_indices=True)
        tap = at // z.shape[3] % 2 * 2 + at % z.shape[3] % 2
    y = act(norm64(p))
    grads = () if dy is None else torch.autograd.grad(y, (z, norm64.weight, norm64.bias), dy.double())
    return p.detach(), tap, y.detach(), grads, norm64


def check(z: Tensor, norm: nn.BatchNorm2d, name: str, *, pooled: bool) -> None:
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm import unit

    act, number = ACTIVATIONS[name]
    random = torch.Generator().manual_seed(7)
    counters = kernels.new_counters(z.device)
    size = z.shape if not pooled else (*z.shape[:2], z.shape[2] // 2, z.shape[3] // 2)
    dy = torch.randn(size, generator=random).to(z.dtype).to(memory_format=torch.channels_last).to(z.device)
    expect_p, expect_tap, expect_y, (expect_dz, expect_dw, expect_db), norm64 = reference(
        z, norm, act, dy, pooled=pooled
    )

    if pooled:
        found, coef = unit.pool_statistics(z, norm, counters)
        assert torch.equal(found.value.double(), expect_p)
        assert torch.equal(found.tap.long(), expect_tap)
    else:
        found, coef = unit.Pooled(z, z), kernels.statistics(z, norm, counters)
    torch.testing.assert_close(norm.running_mean.double(), norm64.running_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.running_var.double(), norm64.running_var, rtol=1e-5, atol=1e-5)

    unit_round, floor = ROUND_OFF[z.dtype], SMALLEST[z.dtype]
    y = unit.activate(found.value, coef, number)
    assert y.is_contiguous(memory_format=torch.channels_last)
    # Terms of the norm are a few times its result; their fp32 errors pass through a slope of at most 1.13.
    terms = norm.weight.abs().max().item() * 8 + norm.bias.abs().max().item()
    assert ((y.double() - expect_y).abs() <= unit_round * expect_y.abs() + floor + 4 * FP32 * terms).all()

    grads = kernels.NormGradients(
        *(torch.full(s, torch.nan, device=z.device) for s in ((3, len(norm.bias)), *[(len(norm.bias),)] * 2))
    )
    unit.reduce_gradient(dy, found.value, coef, grads, counters, number)
    rows = dy.numel() // dy.shape[1]
    atol = 20 * FP32 * rows**0.5 * dy.abs().max().item()
    torch.testing.assert_close(grads.weight.double(), expect_dw, rtol=1e-4, atol=atol)
    torch.testing.assert_close(grads.bias.double(), expect_db, rtol=1e-4, atol=atol)
    if pooled:
        dz = unit.apply_unpool_gradient(dy, found, coef, grads.back, number, pixels=z.shape[2:])
    else:
        dz = unit.apply_gradient(dy, z, coef, grads.back, number)
    scale = (norm64.weight.detach().abs() / (expect_p.var((0, 2, 3), correction=0) + norm.eps).sqrt()).view(1, -1, 1, 1)
    size_of_terms = scale * dy.abs().max().item() * 4
    assert ((dz.double() - expect_dz).abs() <= unit_round * expect_dz.abs() + floor + 20 * FP32 * size_of_terms).all()
    assert not counters[: len(counters) // 2].any()
