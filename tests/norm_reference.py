"""Batch norm, ReLU and the residual add in float64 by torch, and the checks of `kernels.norm` on any device."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hyperbatch.kernels import interpreted
from hyperbatch.kernels import norm as kernels
from hyperbatch.models.blur import blur

# Of one rounding to nearest, relative. Triton's interpreter cuts bf16 off where hardware rounds it: twice as much.
ROUND_OFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7 if interpreted() else 2.0**-8}
SMALLEST = {torch.float32: 0.0, torch.float16: 2.0**-24, torch.bfloat16: 0.0}  # where fp16 stops being relative
FP32 = 3e-6  # sums over the rows in fp32 and a few operations on them, relative to the terms
VARIANCE = 1e-5  # relative: squares are taken about a program's first row, which may lie some deviations off


@dataclass
class Case:
    """x (and x2, the other branch) before their norms; dy, the gradient of what follows."""

    x: Tensor
    norm: nn.BatchNorm2d
    dy: Tensor
    x2: Tensor
    norm2: nn.BatchNorm2d


@dataclass
class Exact:
    """Of relu(norm(x) [+ shortcut]), in float64."""

    before: Tensor  # the ReLU
    y: Tensor
    size: Tensor  # the terms that y was added up from, in magnitude
    mean: Tensor
    var: Tensor
    dx: list[Tensor] = field(default_factory=list)  # of x, and of x2 where it went in
    dweight: list[Tensor] = field(default_factory=list)
    dbias: list[Tensor] = field(default_factory=list)


def image(*shape: int, random: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    value = torch.randn(shape, generator=random, device=random.device)
    return value.to(dtype).to(memory_format=torch.channels_last)


def new_norm(c: int, random: torch.Generator, **options) -> nn.BatchNorm2d:
    """Weights of both signs; running statistics that are on their way."""
    norm = nn.BatchNorm2d(c, device=random.device, **options)
    with torch.no_grad():
        norm.weight.normal_(generator=random)
        norm.bias.normal_(generator=random).div_(2)
        norm.running_mean.normal_(generator=random)
        norm.running_var.uniform_(0.5, 2, generator=random)
    return norm


def make(
    n: int,
    c: int,
    h: int,
    w: int,
    dtype: torch.dtype = torch.float32,
    *,
    device: str = "cpu",
    far: float = 0.5,
    seed: int = 0,
    **options,
) -> Case:
    """far: mean over deviation of each channel, of both signs. dy has a part along x, as the gradient of a loss has."""
    random = torch.Generator(device).manual_seed(seed)
    side = torch.randn(1, c, 1, 1, generator=random, device=device).sign() * far
    noise = image(n, c, h, w, random=random)
    x = (noise + side).to(dtype)
    dy = (image(n, c, h, w, random=random) + 0.3 * noise + 0.2).to(dtype)
    x2 = image(n, c, h, w, random=random, dtype=dtype)
    return Case(x, new_norm(c, random, **options), dy, x2, new_norm(c, random))


def lift(per_channel: Tensor) -> Tensor:
    return per_channel.view(1, -1, 1, 1)


def norm64(x: Tensor, norm: nn.BatchNorm2d, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """norm(x), mean and biased variance. Written out, because torch refuses a batch of one row."""
    mean = x.mean((0, 2, 3))
    var = (x - lift(mean)).square().mean((0, 2, 3))
    return (x - lift(mean)) * lift(weight * (var + norm.eps).rsqrt()) + lift(bias), mean, var


def of_pixels(dy2: kernels.Handed | None, x: Tensor) -> Tensor:
    """The second part of a gradient, for each pixel of x, in float64."""
    if dy2 is None or isinstance(dy2, Tensor):
        return torch.zeros_like(x, dtype=torch.float64) if dy2 is None else dy2.double()
    pixels = torch.zeros_like(x, dtype=torch.float64, requires_grad=True)
    halves = F.avg_pool2d(pixels, 2, ceil_mode=True) if isinstance(dy2, kernels.OfMeans) else blur(pixels, 2)
    return torch.autograd.grad(halves, pixels, dy2.gradient.double())[0]


def exact(case: Case, shortcut: str = "none", *, dy2: kernels.Handed | None = None, dy: Tensor | None = None) -> Exact:
    """shortcut: "none", "plain" (x2 as it is) or "norm" (norm2 of x2)."""
    norms = [case.norm] if shortcut != "norm" else [case.norm, case.norm2]
    leaves = [case.x, case.x2] if shortcut != "none" else [case.x]
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    affine = [[p.detach().double().requires_grad_() for p in (norm.weight, norm.bias)] for norm in norms]
    y, mean, var = norm64(leaves[0], case.norm, *affine[0])
    rstd = (var + case.norm.eps).rsqrt()
    size = (leaves[0].abs() + lift(mean.abs())) * lift((rstd * affine[0][0]).abs()) + lift(affine[0][1].abs())
    if shortcut != "none":
        other = leaves[1] if shortcut == "plain" else norm64(leaves[1], case.norm2, *affine[1])[0]
        y, size = y + other, size + other.abs() + 1
    before, y = y, y.relu()
    g = (case.dy if dy is None else dy).double() + of_pixels(dy2, case.x)
    gradients = torch.autograd.grad(y, [*leaves, *(p for pair in affine for p in pair)], g)
    of_affine = gradients[len(leaves) :]
    result = Exact(before.detach(), y.detach(), size.detach(), mean.detach(), var.detach())
    result.dx, result.dweight, result.dbias = (
        list(gradients[: len(leaves)]),
        list(of_affine[::2]),
        list(of_affine[1::2]),
    )
    return result


@contextlib.contextmanager
def poisoned():
    """Memory that is allocated inside starts as nan (255 in bytes)."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def new_gradients(norm: nn.BatchNorm2d, *, local: bool = False) -> kernels.NormGradients:
    c, device = norm.num_features, norm.weight.device
    back, weight, bias = (torch.full(shape, float("nan"), device=device) for shape in ((3, c), (c,), (c,)))
    return kernels.NormGradients(back, weight, bias, local=local)


def worst(got: Tensor, expect: Tensor, allowed: Tensor | float) -> float:
    """The largest error in units of what is allowed."""
    assert got.shape == expect.shape
    ratio = ((got.double() - expect).abs() / (allowed + 1e-30)).detach()
    return float("inf") if bool(ratio.isnan().any()) else float(ratio.max())


def check_rounded(got: Tensor, expect: Tensor, size: Tensor | float) -> None:
    """One rounding to got's dtype of what fp32 made of terms of this size."""
    assert got.is_contiguous(memory_format=torch.channels_last)
    round_off = 1.001 * ROUND_OFF[got.dtype]
    assert worst(got, expect, round_off * expect.abs() + SMALLEST[got.dtype] + FP32 * size) <= 1


def check_statistics(coef: Tensor, case: Case, want: Exact) -> None:
    std = (want.var + case.norm.eps).sqrt()
    stored = 2.0**-23 * want.mean.abs()  # partials keep their means in fp32
    assert worst(coef[0], want.mean, FP32 * std + stored) <= 1
    assert worst(coef[1] * std, torch.ones_like(std), VARIANCE + stored / std) <= 1
    scale = coef[1].double() * case.norm.weight.double()
    assert worst(coef[2], scale, 2.0**-22 * scale.abs()) <= 1
    shift = case.norm.bias.double() - coef[0].double() * coef[2].double()
    assert worst(coef[3], shift, 2.0**-22 * (case.norm.bias.double().abs() + shift.abs())) <= 1


def check_bits(bits: Tensor, out: Tensor) -> None:
    """Exactly where out > 0, in the order of memory."""
    through = (out > 0).permute(0, 2, 3, 1).reshape(-1, 8).to(torch.uint8)
    weights = 2 ** torch.arange(8, device=out.device, dtype=torch.uint8)
    assert torch.equal(bits, (through * weights).sum(1, dtype=torch.uint8))


def check_gradients(
    dx: Tensor | None, grads: kernels.NormGradients, case: Case, want: Exact, which: int = 0, rounded: float = 0.0
) -> None:
    """rounded: of g, where it is stored in 16 bits before it goes down both branches."""
    x, norm = (case.x, case.norm) if which == 0 else (case.x2, case.norm2)
    var, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    rstd = (var + norm.eps).rsqrt()
    g = 3 * case.dy.double().abs().amax((0, 2, 3)) + 1  # of one element, with whatever is added to it
    rows = x.numel() // x.shape[1]
    near = FP32 * rows**0.5 + rounded  # errors of terms of either sign
    assert worst(grads.bias, want.dbias[which], near * g * rows**0.5) <= 1
    # x - mean in fp32 is off by a rounding of the mean.
    centred = 1 + 2.0**-24 / FP32 * mean.abs() * rstd
    assert worst(grads.weight, want.dweight[which], near * g * centred * rows**0.5) <= 1
    if dx is not None:
        scale = (norm.weight.double() * rstd).abs()
        size = lift(scale * g) * (1 + lift(rstd) * (x.double().abs() + lift(mean.abs())))
        allowed = 1.001 * ROUND_OFF[dx.dtype] * want.dx[which].abs() + SMALLEST[dx.dtype] + (FP32 + rounded) * size
        assert worst(dx, want.dx[which], allowed) <= 1


def wide(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    return copy.deepcopy(norm).double()


def forward(case: Case, shortcut: str, counters: Tensor) -> Any:
    """(out, bits or None, coef, coef of the shortcut or None), through what the models call."""
    if shortcut == "none":
        y, coef = kernels.norm_relu(case.x, case.norm, counters)
        return y, None, coef, None
    coef2 = kernels.statistics(case.x2, case.norm2, counters) if shortcut == "norm" else None
    out, bits, coef = kernels.norm_join(case.x, case.norm, counters, case.x2, coef2)
    return out, bits, coef, coef2


def check(case: Case, shortcut: str, counters: Tensor, *, dy2=None, dy=None) -> None:
    """Forward and backward against float64, in memory that starts as nan."""
    want = exact(case, shortcut, dy2=dy2, dy=dy)
    if dy is None:
        # Where fp32 and float64 may not agree on which side of the ReLU a value is, no gradient tells.
        dy = torch.where(want.before.abs() < FP32 * want.size, 0.0, case.dy)
        dy = dy.contiguous(memory_format=torch.channels_last)
        want = exact(case, shortcut, dy2=dy2, dy=dy)
    with poisoned():
        out, bits, coef, coef2 = forward(case, shortcut, counters)
        grads, grads2 = new_gradients(case.norm), new_gradients(case.norm2)
        if bits is None:
            dxs = [kernels.norm_relu_backward(dy, case.x, coef, grads, counters)]
        else:
            branches = [kernels.Branch(case.x, coef, grads)]
            if coef2 is not None:
                branches.append(kernels.Branch(case.x2, coef2, grads2))
            g, sums, dxs = kernels.join_backward(dy, bits, branches, counters, dy2=dy2)
    check_statistics(coef, case, want)
    check_rounded(out, want.y, want.size)
    rounded = 0.0
    if bits is not None:
        check_bits(bits, out)
        whole = dy.double() + of_pixels(dy2, case.x)
        check_rounded(g, torch.where(out > 0, whole, 0.0), whole.abs().max().item())
        assert torch.equal(sums, grads.bias)
        rounded = ROUND_OFF[g.dtype] if dy2 is not None else 0.0
    check_gradients(dxs[0], grads, case, want, 0, rounded)
    if coef2 is not None:
        check_gradients(dxs[1], grads2, case, want, 1, rounded)
