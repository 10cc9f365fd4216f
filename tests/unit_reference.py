"""A convolution, max-pool, batch norm and a smooth activation in float64 by torch, and the kernels of `norm.unit` and
`norm.conv_pool` beside it."""

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


def reference(
    z: Tensor,
    norm: nn.BatchNorm2d,
    act,
    dy: Tensor | None = None,
    *,
    pooled: bool,
    shortcut: Tensor | None = None,
):
    """In float64: p, its taps, y; with dy also dz, dweight, dbias, dshortcut; and the running statistics afterwards."""
    norm64 = nn.BatchNorm2d(norm.num_features, eps=norm.eps, momentum=norm.momentum).to(z.device).double()
    norm64.load_state_dict(norm.state_dict())
    z = z.double().requires_grad_()
    p, tap = z, None
    if pooled:
        p, at = F.max_pool2d(z, 2, return_indices=True)
        tap = at // z.shape[3] % 2 * 2 + at % z.shape[3] % 2
    s = torch.zeros_like(p) if shortcut is None else shortcut.double()
    s.detach_().requires_grad_()
    y = act(norm64(p) + s)
    grads = () if dy is None else torch.autograd.grad(y, (z, norm64.weight, norm64.bias, s), dy.double())
    return p.detach(), tap, y.detach(), grads, norm64


def check(z: Tensor, norm: nn.BatchNorm2d, name: str, *, pooled: bool, joined: bool = False) -> None:
    """joined: with a shortcut."""
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm import unit

    act, number = ACTIVATIONS[name]
    random = torch.Generator().manual_seed(7)
    counters = kernels.new_counters(z.device)
    size = z.shape if not pooled else (*z.shape[:2], z.shape[2] // 2, z.shape[3] // 2)
    dy = torch.randn(size, generator=random).to(z.dtype).to(memory_format=torch.channels_last).to(z.device)
    shortcut = None
    if joined:
        shortcut = torch.randn(size, generator=random).to(z.dtype).to(memory_format=torch.channels_last).to(z.device)
    expect_p, expect_tap, expect_y, (expect_dz, expect_dw, expect_db, expect_ds), norm64 = reference(
        z, norm, act, dy, pooled=pooled, shortcut=shortcut
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
    y = unit.activate(found.value, coef, number, shortcut)
    assert y.is_contiguous(memory_format=torch.channels_last)
    # Terms of the norm are a few times its result; their fp32 errors pass through a slope of at most 1.13.
    terms = norm.weight.abs().max().item() * 8 + norm.bias.abs().max().item()
    assert ((y.double() - expect_y).abs() <= unit_round * expect_y.abs() + floor + 4 * FP32 * terms).all()

    grads = kernels.NormGradients(
        *(torch.full(s, torch.nan, device=z.device) for s in ((3, len(norm.bias)), *[(len(norm.bias),)] * 2))
    )
    unit.reduce_gradient(dy, found.value, coef, grads, counters, number, shortcut)
    rows = dy.numel() // dy.shape[1]
    atol = 20 * FP32 * rows**0.5 * dy.abs().max().item()
    torch.testing.assert_close(grads.weight.double(), expect_dw, rtol=1e-4, atol=atol)
    torch.testing.assert_close(grads.bias.double(), expect_db, rtol=1e-4, atol=atol)
    if pooled:
        dz = unit.apply_unpool_gradient(dy, found, coef, grads.back, number, pixels=z.shape[2:])
    else:
        dz, ds = unit.apply_gradient(dy, z, coef, grads.back, number, shortcut)
        assert (ds is None) == (not joined)
        if ds is not None:
            worst = unit_round * expect_ds.abs() + floor + 4 * FP32 * terms * dy.abs().max().item()
            assert ((ds.double() - expect_ds).abs() <= worst).all()
    scale = (norm64.weight.detach().abs() / (expect_p.var((0, 2, 3), correction=0) + norm.eps).sqrt()).view(1, -1, 1, 1)
    size_of_terms = scale * dy.abs().max().item() * 4
    assert ((dz.double() - expect_dz).abs() <= unit_round * expect_dz.abs() + floor + 20 * FP32 * size_of_terms).all()
    assert not counters[: len(counters) // 2].any()


def make_conv(n, k, h, w, *, inputs, outputs, dtype=torch.float16, device="cpu", whole=False):
    """x with k channels, of which all but `inputs` are zeros, and a convolution to `outputs`; whole: of whole numbers,
    whose convolution is exact."""
    random = torch.Generator().manual_seed(3)
    x, conv = torch.randn(n, k, h, w, generator=random), nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    with torch.no_grad():
        conv.weight.normal_(0.05, (9 * inputs) ** -0.5, generator=random)
        if whole:
            x.round_()
            conv.weight.copy_(conv.weight.sign() * (torch.rand(conv.weight.shape, generator=random) > 0.7))
    x[:, inputs:] = 0
    return (
        x.to(dtype).to(memory_format=torch.channels_last).to(device),
        conv.to(dtype).to(memory_format=torch.channels_last).to(device),
    )


def check_conv(x: Tensor, conv: nn.Conv2d, name: str, *, whole: bool = False) -> None:
    from hyperbatch.kernels import norm as kernels
    from hyperbatch.kernels.norm import conv_pool, unit

    assert conv_pool.can_take(x, conv)
    act, number = ACTIVATIONS[name]
    random = torch.Generator().manual_seed(5)
    c, inputs, dtype, device = conv.out_channels, conv.in_channels, x.dtype, x.device
    norm = make(1, c, 1, 1, device=device)[1]
    weight, x64 = conv.weight.detach().double(), x[:, :inputs].double()
    z64 = F.conv2d(x64, weight, padding=1)
    if whole:
        z64 = z64.round()  # cuDNN's transforms leave whole numbers a little apart
    terms = F.conv2d(x64.abs(), weight.abs(), padding=1)
    unit_round, floor = ROUND_OFF[dtype], SMALLEST[dtype]
    tolerance = unit_round * z64.abs() + floor + FP32 * terms
    counters = kernels.new_counters(device)
    found, coef = conv_pool.conv_pool_statistics(x, conv, norm, counters)
    expect, expect_tap, *_ = reference(z64, norm, act, pooled=True)
    assert found.value.is_contiguous(memory_format=torch.channels_last)
    if whole:
        assert torch.equal(found.value.double(), expect)
        assert torch.equal(found.tap.long(), expect_tap)
    else:
        worst = F.max_pool2d(tolerance, 2)
        assert ((found.value.double() - expect).abs() <= worst).all()
        # What stood at the tap is the maximum, but for the rounding of the two.
        h, w = (side // 2 * 2 for side in x.shape[2:])
        pixels = z64[:, :, :h, :w].unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(3, 5, 0, 1, 2, 4).flatten(0, 1)
        assert ((pixels.gather(0, found.tap.long()[None])[0] - expect).abs() <= 2 * worst).all()

    # Statistics of p as it is stored.
    p = found.value.double()
    torch.testing.assert_close(coef[0].double(), p.mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
    rstd = (p.var((0, 2, 3), correction=0) + norm.eps).rsqrt()
    torch.testing.assert_close(coef[1].double(), rstd, rtol=1e-5, atol=0)
    before = make(1, c, 1, 1, device=device)[1]
    for mine, old, new in (
        (norm.running_mean, before.running_mean, p.mean((0, 2, 3))),
        (norm.running_var, before.running_var, p.var((0, 2, 3))),
    ):
        torch.testing.assert_close(mine.double(), old.double().lerp(new, norm.momentum), rtol=1e-5, atol=1e-5)
    assert not counters[: len(counters) // 2].any()

    dy = torch.randn(p.shape, generator=random).to(dtype).to(memory_format=torch.channels_last).to(device)
    back = torch.randn(3, c, generator=random).to(device) / 16  # fp16 must hold the sums of all pixels
    dz = unit.apply_unpool_gradient(dy, found, coef, back, number, pixels=x.shape[2:]).double()
    dw = torch.full_like(conv.weight, torch.nan)
    conv_pool.weight_gradient_from_pooled(dy, found, coef, back, number, x, dw)
    expect = torch.nn.grad.conv2d_weight(x64, weight.shape, dz, padding=1)
    size = torch.nn.grad.conv2d_weight(x64.abs(), weight.shape, dz.abs(), padding=1)
    # The two kernels may contract their sums differently, and so round a dz to either side.
    error = (dw.double() - expect).abs()
    assert (error <= unit_round * expect.abs() + floor + (unit_round + FP32) * size).all()
