"""GELU of a 16-bit matrix, and its gradients (Triton). Reference: `hyperbatch.models.gelu`.

    forward     h [m, c]   ->  y = gelu(h)                                1 read, 1 write
    backward    dy, h      ->  dh = dy * gelu'(h), partial sums of dh     2 reads, 1 write
    sum         partials   ->  the column sums of dh: the gradient of a bias that was added to h, in fp32

Sums are taken before rounding. Partials are added in a fixed order, so the bits of a gradient are always the same.

The exact form computes the normal distribution from one exponential and one reciprocal, with a relative error of 4e-6
(rounding to fp16: 2e-4). Triton's erf takes twice the instructions, and these, not memory, limit the kernel.
"""

# Triton's decorator hides the parameters of kernels from the type checker.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm.tiles import Tiling, own_rows, own_tile, processors

SIZES = ("M", "ROWS", "PARTIALS")  # arguments whose values need no new compilation
ALIGNED = 8  # columns: a thread reads this many at once
SUM_COLUMNS, SUM_ROWS = 32, 256  # tile of a program that adds up partials; its loads run at the same time


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def inverse(v):
    """1 / v for v >= 1, in two instructions, where a division takes ten. Infinity gives 0."""
    root = tl.rsqrt(v)
    return root * root


@triton.jit
def below(u):
    """Returns (the normal distribution function at u, exp(-u^2 / 2)).

    The tail beyond |u| is the exponential times a polynomial in 1 / (1 + 0.44 |u|) without a constant term, as in
    Abramowitz and Stegun, 7.1.26; the coefficients are fitted for the least relative error.
    """
    bell = tl.exp2(u * u * -0.7213475204444817)  # log2(e) / 2
    t = inverse(1.0 + 0.4421652850834526 * tl.abs(u))
    tail = 0.06746829 * t - 0.24172006
    tail = tail * t + 0.2191356
    tail = tail * t + 0.09536552
    tail = tail * t + 0.18382363
    tail = tail * t + 0.17592876
    tail = tail * t * bell
    return tl.where(u < 0, tail, 1.0 - tail), bell


@triton.jit
def logistic(u):
    """Returns (the logistic function by which the tanh form multiplies u, the derivative of its argument)."""
    # 2 sqrt(2 / pi) (u + 0.044715 u^3)
    argument = u * (1.5957691216057308 + 0.07135481282151125 * u * u)
    return inverse(1.0 + tl.exp2(argument * -1.4426950408889634)), 1.5957691216057308 + 0.21406443846453376 * u * u


@triton.jit
def gelu(u, TANH: tl.constexpr):
    if TANH:
        share, _ = logistic(u)
        return u * share
    share, _ = below(u)
    return u * share


@triton.jit
def slope(u, TANH: tl.constexpr):
    """The derivative of `gelu`."""
    if TANH:
        share, rise = logistic(u)
        return share + u * share * (1.0 - share) * rise
    share, bell = below(u)
    return share + u * 0.3989422804014327 * bell


@kernel(do_not_specialize=SIZES)
def _gelu_kernel(h, y, M, C, TANH: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    _, base, _, at, inside = own_tile(M, C, BM, BC)
    u = tl.load(h + base + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + base + at, gelu(u, TANH).to(y.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=SIZES)
def _gelu_gradient_kernel(
    dy,
    h,
    dh,
    part,
    M,
    C,
    ROWS,
    TANH: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    _, c, p, base, rows = own_rows(M, C, ROWS, BC)
    # This tile of sums is reduced once at the end. A reduction in every iteration would cost more than the loads.
    total = tl.zeros([BM, BC], tl.float32)
    for i in tl.range(0, rows, BM, num_stages=STAGES):
        r = i + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        at = base + r[:, None] * C + c[None, :]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        g *= slope(tl.load(h + at, mask=inside, other=0.0).to(tl.float32), TANH)
        tl.store(dh + at, g.to(dh.dtype.element_ty), mask=inside)
        total += g
    tl.store(part + p * C + c, tl.sum(total, 0))


@kernel(do_not_specialize=SIZES)
def _sum_kernel(part, out, rest, PARTIALS, C, SPLIT, BM: tl.constexpr, BC: tl.constexpr):
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros([BM, BC], tl.float32)
    for i in range(0, PARTIALS, BM):
        p = i + tl.arange(0, BM)
        there = (p < PARTIALS)[:, None] & (c < C)[None, :]
        total += tl.load(part + p[:, None] * C + c[None, :], mask=there, other=0.0)
    sums = tl.sum(total, 0)
    tl.store(out + c, sums.to(out.dtype.element_ty), mask=c < SPLIT)
    tl.store(rest + (c - SPLIT), sums.to(rest.dtype.element_ty), mask=(c >= SPLIT) & (c < C))


# --- launches ---------------------------------------------------------------------------------------------------------


def takes(h: Tensor) -> bool:
    """Whether these kernels support a tensor: 16 bits, and rows of whole vectors."""
    return h.dtype in (torch.float16, torch.bfloat16) and h.shape[-1] % ALIGNED == 0 and h.numel() > 0


def forward(h: Tensor, tanh: bool) -> Tensor:
    """Computes gelu(h) of a contiguous tensor."""
    c = h.shape[-1]
    m = h.numel() // c
    y = torch.empty_like(h)
    tiling = Tiling.of(m, c, elements=4096, warps=4, widest=512, programs=1 << 40)  # one tile per program
    with torch.cuda.device_of(h):
        _gelu_kernel[(tiling.blocks * tiling.programs,)](h, y, m, c, TANH=tanh, **tiling.options)
    return y


def backward(dy: Tensor, h: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Returns (dh, its sums in fp32 over all dimensions but the last) of contiguous tensors."""
    c = h.shape[-1]
    m = h.numel() // c
    dh, total = torch.empty_like(h), torch.empty(c, dtype=torch.float32, device=h.device)
    # Blocks of few columns leave few partials. With tiles of this size, registers suffice for six programs per
    # multiprocessor, which all run at once.
    tiling = Tiling.of(m, c, elements=2048, warps=4, widest=128, programs=6 * processors(), stages=3)
    part = torch.empty(tiling.programs, c, dtype=torch.float32, device=h.device)
    with torch.cuda.device_of(h):
        _gelu_gradient_kernel[tiling.grid](
            dy, h, dh, part, m, c, tiling.rows_per_program, TANH=tanh, **tiling.in_stages
        )
    add_up(part, total)
    return dh, total


def add_up(part: Tensor, out: Tensor, rest: Tensor | None = None) -> None:
    """Adds up the columns of partials, in the shape and precision of `out`. Columns beyond its size go to `rest`."""
    programs, c = part.shape
    split = out.numel()
    rest = out if rest is None else rest
    grid = (triton.cdiv(c, SUM_COLUMNS),)
    with torch.cuda.device_of(part):
        _sum_kernel[grid](part, out, rest, programs, c, split, BM=SUM_ROWS, BC=SUM_COLUMNS, num_warps=8)
