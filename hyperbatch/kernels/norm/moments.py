"""Moments of the rows of y, the input of a 1x1 convolution, computed together with y = relu(norm(x)) (Triton).

    s = sum of y's rows [c]      G = y.T @ y [c, c]      from which `product` computes the norm of the output

    up to 128 columns    the pass that computes y sums both                                      1 read, 1 write
    with more            it sums s and writes y about its centre; cuBLAS computes G from that    2 reads, 2 writes

Reference: float64 sums in tests/product_reference.py. Partials are summed in a fixed order: the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.conv import rows as as_rows
from hyperbatch.kernels.norm.sums import add_partials, is_last
from hyperbatch.kernels.norm.tiles import Tiling, matrix, overlapping, processors, reducing

WIDEST = 128  # channels for which one program can hold G in registers
FAR = tl.constexpr(16.0)  # with a larger ratio of squared mean to variance, a column is taken about a centre


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _rows(x, r, inside, c, scale, shift, C: tl.constexpr, NORM: tl.constexpr):
    """Loads rows of y: those of x, or relu(norm(x)) rounded as it is stored."""
    v = tl.load(x + r[:, None] * C + c[None, :], mask=inside, other=0.0)
    if NORM:
        v = v.to(tl.float32) * scale[None, :] + shift[None, :]
        v = tl.where(v < 0, 0.0, v).to(x.dtype.element_ty)  # a nan is kept, as in torch
    return v


@triton.jit
def _centre(x, coef, scale, shift, c, M, C: tl.constexpr, NORM: tl.constexpr, BM: tl.constexpr):
    """Returns a value near the mean of columns that are far from 0, else 0. About it, G - s s.T / m loses no digits.

    Near such a value y - centre is exact. For other columns its rounding would shift the mean, and no centre is needed.
    """
    if NORM:
        mean = tl.maximum(tl.load(coef + c) * scale + shift, 0.0)
        deviation = scale / tl.load(coef + C + c)
        variance = deviation * deviation
    else:
        r = tl.arange(0, BM)
        count = tl.minimum(M, BM)
        inside = (r < count)[:, None]
        v = _rows(x, r, inside, c, scale, shift, C, NORM).to(tl.float32)
        mean = tl.sum(v, 0) / count
        apart = tl.where(inside, v - mean[None, :], 0.0)
        variance = tl.sum(apart * apart, 0) / count
    return tl.where(mean * mean > variance * FAR, mean, 0.0).to(x.dtype.element_ty)


@kernel
def _moments_kernel(
    x,
    coef,
    y,
    apart,
    part,
    counters,
    moments,
    M,
    ROWS,
    C: tl.constexpr,
    NORM: tl.constexpr,  # y = relu(norm(x)) is computed and stored; otherwise x is y
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes partials of G and s for all columns at once.

    If there are too many columns for one program, only partials of s are computed, and y about its centre is stored in
    `apart`, so that a matrix product can compute G.
    """
    ALL: tl.constexpr = BC == C
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c = column * BC + tl.arange(0, BC)
    if OVERLAP:
        gdc_wait()
    scale, shift = tl.load(coef + 2 * C + c), tl.load(coef + 3 * C + c)
    centre = _centre(x, coef, scale, shift, c, M, C, NORM, BM)
    if p == 0:
        tl.store(moments + (C + 1) * C + c, centre.to(tl.float32))
    if ALL:
        products = tl.zeros([BC, BC], tl.float32)
    rows = tl.minimum(M - p * ROWS, ROWS)
    base = (p * ROWS).to(tl.int64) * C
    x += base
    y += base
    apart += base
    total = tl.zeros([BM, BC], tl.float32)
    for k in tl.range(0, rows, BM, num_stages=STAGES):
        r = k + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        v = _rows(x, r, inside, c, scale, shift, C, NORM)
        if NORM:
            tl.store(y + r[:, None] * C + c[None, :], v, mask=inside)
        v = tl.where(inside, v - centre[None, :], 0.0).to(v.dtype)
        total += v.to(tl.float32)
        if ALL:
            products = tl.dot(tl.trans(v), v, products)
        else:
            tl.store(apart + r[:, None] * C + c[None, :], v, mask=inside)
    if OVERLAP:
        gdc_launch_dependents()
    total = tl.sum(total, 0)
    if ALL:
        part += p * (C + 1) * C
        tl.store(part + c[:, None] * C + c[None, :], products)
        tl.store(part + C * C + c, total)
    else:
        tl.store(part + p * C + c, total)
        if is_last(counters + column, programs):
            tl.store(moments + C * C + c, add_partials(part, programs, c, C))


@kernel
def _add_moments_kernel(part, moments, programs, C: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr):
    """Adds up some columns of one row of G, or of s, over all programs."""
    if OVERLAP:
        gdc_wait()
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.program_id(0) * C
    tl.store(moments + row + c, add_partials(part + row, programs, c, (C + 1) * C))


# --- what the models call ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Sums over the rows of y, the input of `product_statistics`."""

    about: Tensor  # fp32 [c + 2, c]: (y - centre).T @ (y - centre), the sum of y - centre, the centre
    rows: int


def normalise_with_moments(x: Tensor, coef: Tensor, counters: Tensor) -> tuple[Tensor, Moments]:
    """Computes y = relu(norm(x)) and its moments, with up to 128 channels in one pass over x."""
    return _moments(x, coef, counters)


def moments_of(y: Tensor, counters: Tensor) -> Moments:
    """Computes the moments of an existing y."""
    return _moments(y, None, counters)[1]


def outer(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a.T @ b of 16-bit rows, in fp32. cuBLAS reads them at the speed of the memory."""
    a, b = as_rows(a), as_rows(b)
    if out.is_cuda:
        torch.mm(a.t(), b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a.t().float(), b.float(), out=out)


def _moments(x: Tensor, coef: Tensor | None, counters: Tensor) -> tuple[Tensor, Moments]:
    m, c = matrix(x)
    if c & (c - 1) or c < 16:
        raise ValueError(f"moments are made for 16, 32, 64, ... channels, not for {c}")
    tiling = _tiling(m, c)
    in_one_pass = tiling.columns == c
    y = x if coef is None else torch.empty_like(x)
    apart = y if in_one_pass else torch.empty_like(x)
    part = torch.empty(tiling.programs, c + 1 if in_one_pass else 1, c, device=x.device, dtype=torch.float32)
    about = torch.empty(c + 2, c, device=x.device, dtype=torch.float32)
    tensors = x, about if coef is None else coef, y, apart, part, counters, about
    options = {"C": c, "NORM": coef is not None, **tiling.in_stages, **overlapping()}
    _moments_kernel[tiling.grid](*tensors, m, tiling.rows_per_program, **options)
    if in_one_pass:
        width = min(c, 32)
        grid = c + 1, c // width
        _add_moments_kernel[grid](part, about, tiling.programs, C=c, BC=width, num_warps=4, **overlapping())
    else:
        outer(apart, apart, about[:c])
    return y, Moments(about=about, rows=m)


def _tiling(m: int, c: int) -> Tiling:
    if c > WIDEST:
        return reducing(m, c, warps=8, per_processor=4, stages=1)
    return Tiling.of(m, c, elements=8192, warps=8, widest=c, programs=processors(), stages=4)
