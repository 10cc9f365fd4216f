"""A 1x1 convolution and its batch norm: inputs, float64 torch as the reference, and the checks of `norm.product`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyperbatch.kernels import norm as kernels
from hyperbatch.kernels.norm.moments import Moments, normalise_with_moments
from hyperbatch.kernels.norm.product import product_backward, product_statistics

HALF_ULP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # relative
SMALLEST = {torch.float16: 2.0**-25, torch.bfloat16: 0.0}  # half of the smallest number


@dataclass
class Case:
    y: Tensor
    w: Tensor
    g: Tensor
    weight: Tensor
    bias: Tensor


@dataclass
class Result:
    mean: Tensor
    rstd: Tensor
    running_mean: Tensor
    running_var: Tensor
    dy: Tensor
    dw: Tensor
    dweight: Tensor
    dbias: Tensor


def make(
    size: tuple[int, int, int],
    c: int,
    n: int,
    dtype: torch.dtype = torch.float16,
    *,
    device: str = "cpu",
    far: float = 0.0,
    scale: float = 1.0,
    gamma: float = 1.0,
    seed: int = 0,
) -> Case:
    """far: mean over deviation of every fourth channel of y. g has a part along z, as the gradient of a loss has."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=random)

    b, h, width = size
    y = normal(b, c, h, width) + normal(1, c, 1, 1)
    if far:
        y[:, ::4] = y[:, ::4] / far + 1
    y = y.relu().to(dtype).to(memory_format=torch.channels_last)
    w = (normal(n, c) / c**0.5).to(dtype)
    z = F.conv2d(y.float(), w.float()[:, :, None, None])
    along = 0.1 * normal(1, n, 1, 1) * (z - z.mean((0, 2, 3), keepdim=True))
    g = (scale * (normal(b, n, h, width) + 0.1 * normal(1, n, 1, 1) + along)).to(dtype)
    g = g.to(memory_format=torch.channels_last)
    return Case(y, w, g, gamma * (1 + 0.2 * normal(n)), normal(n))


def statistics_errors(
    size: tuple[int, int, int], c: int, ratio: float, *, made: bool, device: str = "cpu"
) -> tuple[float, float]:
    """Of z's mean, in standard deviations, and of its variance, relative; mean over deviation of each channel of y is
    `ratio`. made: y comes out of a norm, else it is there. fp16, and no eps that would hide the variance."""
    random = torch.Generator(device).manual_seed(0)
    b, h, width = size
    y = torch.randn(b, c, h, width, device=device, generator=random)
    y = y.half().to(memory_format=torch.channels_last)
    w = (torch.randn(32, c, device=device, generator=random) / c**0.5).half()
    counters, norm = kernels.new_counters(y.device), nn.BatchNorm2d(c, device=device)
    with torch.no_grad():
        norm.weight.fill_(1 / max(ratio, 1))
        norm.bias.fill_(min(ratio, 1))
    if made:
        y, source = normalise_with_moments(y, kernels.statistics(y, norm, counters), counters)
    else:
        y = source = (y / max(ratio, 1) + min(ratio, 1)).to(memory_format=torch.channels_last)
    kept = product_statistics(source, w, nn.BatchNorm2d(32, eps=0.0, device=device), counters)
    var, mean = torch.var_mean(rows(y) @ w.double().T, 0, correction=0)
    of_mean, of_var = (kept.coef[0].double() - mean) / var.sqrt(), kept.coef[1].double() ** -2 / var - 1
    return float(of_mean.abs().max()), float(of_var.abs().max())


def new_norm(case: Case) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(len(case.weight), device=case.y.device)
    with torch.no_grad():
        norm.weight.copy_(case.weight)
        norm.bias.copy_(case.bias)
        norm.running_mean.uniform_(-1, 1, generator=torch.Generator(case.y.device).manual_seed(1))
        norm.running_var.uniform_(0.5, 2, generator=torch.Generator(case.y.device).manual_seed(2))
    return norm


def reference(case: Case) -> Result:
    norm = new_norm(case).double()
    y, w = case.y.double().requires_grad_(), case.w.double().requires_grad_()
    z = F.conv2d(y, w[:, :, None, None])
    norm(z).backward(case.g.double())
    var, mean = torch.var_mean(z.detach(), (0, 2, 3), correction=0)
    rstd = (var + norm.eps).rsqrt()
    return Result(mean, rstd, norm.running_mean, norm.running_var, y.grad, w.grad, norm.weight.grad, norm.bias.grad)


def column_sums(g: Tensor) -> Tensor:
    return g.double().sum((0, 2, 3)).float()


def nans(*shape: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), device=like.device, dtype=dtype)


def through_kernels(case: Case, source: Tensor | Moments | None = None) -> Result:
    n, c = case.w.shape
    norm, counters = new_norm(case), kernels.new_counters(case.y.device)
    kept = product_statistics(case.y if source is None else source, case.w, norm, counters)
    grads = kernels.NormGradients(nans(3, n, like=case.y), nans(n, like=case.y), nans(n, like=case.y))
    dw = nans(n, c, like=case.y, dtype=case.w.dtype)
    dy = product_backward(case.g, case.y, case.w, kept, column_sums(case.g), grads, dw, counters)
    assert not counters.any()
    return Result(kept.coef[0], kept.coef[1], norm.running_mean, norm.running_var, dy, dw, grads.weight, grads.bias)


def plain(case: Case) -> Result:
    """torch, with a z of 16 bits."""
    norm = new_norm(case)
    y, w = case.y.detach().requires_grad_(), case.w.detach().requires_grad_()
    z = F.conv2d(y, w[:, :, None, None])
    norm(z).backward(case.g)
    var, mean = torch.var_mean(z.detach().double(), (0, 2, 3), correction=0)
    rstd = (var + norm.eps).rsqrt()
    return Result(mean, rstd, norm.running_mean, norm.running_var, y.grad, w.grad, norm.weight.grad, norm.bias.grad)


def rows(x: Tensor) -> Tensor:
    return x.double().permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def error(value: Tensor, exact: Tensor) -> float:
    """Root of the mean square, relative."""
    return float((value.double() - exact).norm() / exact.norm())


def check(case: Case, got: Result, *, sums: float) -> None:
    """Against float64. sums: relative error of fp32 sums over the rows, in the order the device takes them."""
    exact, ulp = reference(case), HALF_ULP[case.y.dtype]
    # Of sums in fp32 alone, of 16-bit numbers whose products are exact.
    magnitude = (case.w.double().abs() @ case.y.double().mean((0, 2, 3))).max()
    torch.testing.assert_close(got.mean.double(), exact.mean, rtol=0, atol=sums * float(magnitude))
    torch.testing.assert_close(got.rstd.double(), exact.rstd, rtol=20 * sums, atol=0)
    torch.testing.assert_close(got.running_mean.double(), exact.running_mean, rtol=1e-6, atol=sums * float(magnitude))
    torch.testing.assert_close(got.running_var.double(), exact.running_var, rtol=20 * sums, atol=0)
    torch.testing.assert_close(got.dbias.double(), exact.dbias, rtol=1e-6, atol=0)
    # g.T @ y, of which the part of the means is taken off.
    outer, means = (rows(case.g).T @ rows(case.y)).abs(), rows(case.g).sum(0).abs()[:, None] * rows(case.y).mean(0)
    lost = sums * (outer + means)
    allowed = exact.rstd * (case.w.double().abs() * lost).sum(1) + 10 * sums * exact.dweight.abs()
    assert bool(((got.dweight.double() - exact.dweight).abs() < allowed).all())
    # dw is rounded once. dy, too, and so are the entries of a w and Q: two roundings of equal size and half a third.
    smallest = SMALLEST[case.y.dtype]
    lost = float(((case.weight.double() * exact.rstd)[:, None] * lost).norm() / exact.dw.norm())
    assert error(got.dw, exact.dw) < 0.6 * ulp + lost + smallest / float(exact.dw.square().mean().sqrt())
    assert error(got.dy, exact.dy) < 0.8 * ulp + 10 * sums + smallest / float(exact.dy.square().mean().sqrt())
    # No element is far off: neither the last rows nor the far columns.
    spread = exact.dy.square().mean((0, 2, 3), keepdim=True).sqrt()
    assert float(((got.dy.double() - exact.dy).abs() / (spread + exact.dy.abs() + 16 * smallest / ulp)).max()) < 4 * ulp
