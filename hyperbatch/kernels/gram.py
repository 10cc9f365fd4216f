"""Batch norm after a 1x1 convolution without reading the convolution's output: its moments are those of the input.

z = y @ w.T is the widest tensor of a residual block: y [m, c] (rows of a channels-last tensor), w [n, c], n = 4 c. All
that its batch norm needs follows from sums over rows that are as small as w (capitals: the matrix, ' : about its mean).

    forward    s = sum of y's rows, G' = y'.T @ y'    taken while y = relu(norm(x)) is made: no pass of their own
               mean of z = w @ s / m,  variance of z = diagonal of w @ G' @ w.T / m
    backward   given g, the gradient of norm(z), and the sums of its columns (a, b: dz = a * g + b * z' - a * mean of g)
               P' = g.T @ y' = g.T @ y - (sum of g) s.T / m
               sum of g * z' = row sums of w * P'     -> a, b, gradients of the norm's weight and bias
               dw = dz.T @ y = a P' + b (w @ G')
               dy = dz @ w   = g @ (a w) + y @ Q + constant,   Q = w.T @ diag(b) @ w

    normalise_with_gram   x -> y, partials of G and s      1 read, 1 write of c columns
                          sum of the partials              [c, c]
    product_statistics    coef, running statistics, w @ G' [n, c]
    product_backward      partials of P                    1 read of n + c columns
                          dw, a w, back                    [n, c]
                          Q, constant                      [c, c]
                          dy                               1 read of n + c columns, 1 write of c

The norm so sees z before it is rounded to 16 bits. References: `kernels.norm` after torch's convolution. Partials are
summed in their order: the same bits every time.
"""

# Triton's decorator hides what a kernel takes from the type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from hyperbatch.kernels.norm import (
    COLUMN_BLOCKS,
    NormGradients,
    Tiling,
    finish_statistics,
    is_last,
    matrix,
    new_coef,
    processors,
    store_gradients,
    store_partials,
)

FAR = tl.constexpr(16.0)  # squared mean over variance from which a column is taken about a centre
PARTS = tl.constexpr(8)  # partials summed at once


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _rows(x, r, inside, c, scale, shift, C: tl.constexpr, NORM: tl.constexpr):
    """Rows of y: those of x, or relu(norm(x)) rounded as it is stored."""
    v = tl.load(x + r[:, None] * C + c[None, :], mask=inside, other=0.0)
    if NORM:
        v = tl.maximum(v.to(tl.float32) * scale[None, :] + shift[None, :], 0.0).to(x.dtype.element_ty)
    return v


@triton.jit
def _centre(x, coef, scale, shift, c, M, C: tl.constexpr, NORM: tl.constexpr, BM: tl.constexpr):
    """A value near the mean of columns that lie far from 0, else 0: G about it loses no digits in G - s s.T / m.

    Near such a value y - centre is exact; elsewhere the rounding would shift the mean, and no centre is needed.
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


@triton.jit
def _gram_kernel(
    x,
    coef,
    y,
    part,
    moments,
    M,
    ROWS,
    C: tl.constexpr,
    NORM: tl.constexpr,  # y = relu(norm(x)) is made and stored; else x is y
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS: tl.constexpr = C // BC
    i, j, p = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    if i > j:  # G is symmetric
        return
    ci, cj = i * BC + tl.arange(0, BC), j * BC + tl.arange(0, BC)
    scale_i, shift_i = tl.load(coef + 2 * C + ci), tl.load(coef + 3 * C + ci)
    scale_j, shift_j = tl.load(coef + 2 * C + cj), tl.load(coef + 3 * C + cj)
    centre_i = _centre(x, coef, scale_i, shift_i, ci, M, C, NORM, BM)
    centre_j = _centre(x, coef, scale_j, shift_j, cj, M, C, NORM, BM)
    rows = tl.minimum(M - p * ROWS, ROWS)
    base = (p * ROWS).to(tl.int64) * C
    x += base
    y += base
    gram = tl.zeros([BC, BC], tl.float32)
    total = tl.zeros([BM, BC], tl.float32)
    for k in tl.range(0, rows, BM, num_stages=STAGES):
        r = k + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        v = _rows(x, r, inside, cj, scale_j, shift_j, C, NORM)
        if NORM:
            tl.store(y + r[:, None] * C + cj[None, :], v, mask=inside & (i == j))
        right = tl.where(inside, v - centre_j[None, :], 0.0).to(v.dtype)
        left = right
        if BLOCKS > 1:
            left = _rows(x, r, inside, ci, scale_i, shift_i, C, NORM) - centre_i[None, :]
        total += right.to(tl.float32)
        gram = tl.dot(tl.trans(left.to(v.dtype)), right, gram)
    part += p * (C + 1) * C
    tl.store(part + ci[:, None] * C + cj[None, :], gram)
    if i == j:
        tl.store(part + C * C + cj, tl.sum(total, 0))
        if p == 0:
            tl.store(moments + (C + 1) * C + cj, centre_j.to(tl.float32))


@triton.jit
def _sum_kernel(part, moments, programs, C: tl.constexpr, BC: tl.constexpr):
    """One row of G, or s, of all programs. Blocks below the diagonal are read from above it."""
    row = tl.program_id(0)
    c = tl.arange(0, C)
    at = tl.where((row < C) & (row // BC > c // BC), c * C + row, row * C + c)
    total = tl.zeros([PARTS, C], tl.float32)
    for i in range(0, programs, PARTS):
        p = i + tl.arange(0, PARTS)
        total += tl.load(part + p[:, None] * (C + 1) * C + at[None, :], mask=(p < programs)[:, None], other=0.0)
    tl.store(moments + row * C + c, tl.sum(total, 0))


@triton.jit
def _statistics_kernel(
    moments,
    w,
    centred,
    sums,
    squares,
    part,
    counters,
    coef,
    weight,
    bias,
    running_mean,
    running_var,
    M,
    momentum,
    eps,
    N: tl.constexpr,
    C: tl.constexpr,
    LOCAL: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    column, row = tl.program_id(0), tl.program_id(1)
    n, c = row * BN + tl.arange(0, BN), column * BC + tl.arange(0, BC)
    total = tl.load(moments + C * C + c)
    product = tl.zeros([BN, BC], tl.float32)
    mean = tl.zeros([BN], tl.float32)
    for j in range(0, C, BK):
        k = j + tl.arange(0, BK)
        apart = tl.load(moments + C * C + k) / M  # mean of y about its centre
        left = tl.load(w + n[:, None] * C + k[None, :]).to(tl.float32)
        right = tl.load(moments + k[:, None] * C + c[None, :]) - apart[:, None] * total[None, :]
        product = tl.dot(left, right, product, input_precision="ieee")
        mean += tl.sum(left * (tl.load(moments + (C + 1) * C + k) + apart)[None, :], 1)
    tl.store(centred + n[:, None] * C + c[None, :], product)
    own = tl.load(w + n[:, None] * C + c[None, :]).to(tl.float32)
    tl.store(squares + column * N + n, tl.sum(own * product, 1))
    if row == 0:
        tl.store(sums + c, total + M * tl.load(moments + (C + 1) * C + c))
    if is_last(counters + row, tl.num_programs(0)):
        total = tl.zeros([BN], tl.float32)
        for j in range(C // BC):
            total += tl.load(squares + j * N + n, cache_modifier=".cg")
        # Of a constant z rounding may leave less than nothing.
        store_partials(part, 0, 1, N, n, mean, tl.maximum(total, 0.0))
        tl.debug_barrier()  # stored by some threads, read by others
        finish_statistics(part, coef, weight, bias, running_mean, running_var, n, M, N, M, 1, momentum, eps, LOCAL)


@triton.jit
def _outer_kernel(
    g,
    y,
    part,
    M,
    ROWS,
    N: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """P = g.T @ y of some rows."""
    block, p = tl.program_id(0), tl.program_id(1)
    n = block // (C // BC) * BN + tl.arange(0, BN)
    c = block % (C // BC) * BC + tl.arange(0, BC)
    rows = tl.minimum(M - p * ROWS, ROWS)
    base = (p * ROWS).to(tl.int64)
    g += base * N
    y += base * C
    product = tl.zeros([BN, BC], tl.float32)
    for k in tl.range(0, rows, BM, num_stages=STAGES):
        r = k + tl.arange(0, BM)
        inside = (r < rows)[:, None]
        left = tl.load(g + r[:, None] * N + n[None, :], mask=inside, other=0.0)
        right = tl.load(y + r[:, None] * C + c[None, :], mask=inside, other=0.0)
        product = tl.dot(tl.trans(left), right, product)
    tl.store(part + p * N * C + n[:, None] * C + c[None, :], product)


@triton.jit
def _largest_to_one(values, N: tl.constexpr):
    """The power of two that brings the largest of |values| into [1, 2)."""
    largest = tl.max(tl.abs(tl.load(values + tl.arange(0, N))), 0)
    return tl.exp2(-tl.floor(tl.log2(tl.minimum(tl.maximum(largest, 2.0**-100), 2.0**100))))


@triton.jit
def _weight_gradient_kernel(
    part,
    programs,
    centred,
    sums,
    w,
    coef,
    sum_g,
    back,
    dweight,
    dbias,
    dw,
    aw,
    M,
    N: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
):
    """Some rows of P -> back and the gradients of the norm, dw, and a * w for the gradient of y."""
    first = tl.program_id(0) * BN
    n, c = first + tl.arange(0, BN), tl.arange(0, C)
    flat = first * C + tl.arange(0, BN * C)
    total = tl.zeros([PARTS, BN * C], tl.float32)
    for i in range(0, programs, PARTS):
        p = i + tl.arange(0, PARTS)
        total += tl.load(part + p[:, None] * N * C + flat[None, :], mask=(p < programs)[:, None], other=0.0)
    g = tl.load(sum_g + n)
    outer = tl.reshape(tl.sum(total, 0), [BN, C]) - (g / M)[:, None] * tl.load(sums + c)[None, :]
    at = n[:, None] * C + c[None, :]
    own = tl.load(w + at).to(tl.float32)
    sum_gz = tl.sum(own * outer, 1)
    store_gradients(g, sum_gz, coef, back, dweight, dbias, n, M, N, False)
    rstd, a = tl.load(coef + N + n), tl.load(coef + 2 * N + n)
    b = -a * rstd * rstd * sum_gz / M
    tl.store(dw + at, (a[:, None] * outer + b[:, None] * tl.load(centred + at)).to(dw.dtype.element_ty))
    # The norm's weight may be tiny, as after a start from 0: scaled, a * w stays a normal number of 16 bits.
    unit = _largest_to_one(coef + 2 * N, N)
    tl.store(aw + at, (own * (a * unit)[:, None]).to(aw.dtype.element_ty))


@triton.jit
def _quadratic_kernel(
    w,
    sum_g,
    sums,
    back,
    q,
    constant,
    units,
    part,
    counters,
    M,
    N: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """Q = w.T @ diag(b) @ w in 16 bits, and the constant of dy.

    b is a mean of g * z' and can be far below g: unscaled, Q would fall among the subnormal numbers of fp16.
    """
    i, j = tl.program_id(0), tl.program_id(1)
    ci, cj = i * BC + tl.arange(0, BC), j * BC + tl.arange(0, BC)
    a_unit, b_unit = _largest_to_one(back, N), _largest_to_one(back + N, N)
    product = tl.zeros([BC, BC], tl.float32)
    shift = tl.zeros([BC], tl.float32)
    for k in range(0, N, BK):
        n = k + tl.arange(0, BK)
        b = tl.load(back + N + n) * b_unit
        left = tl.load(w + n[None, :] * C + ci[:, None]).to(tl.float32) * b[None, :]
        right = tl.load(w + n[:, None] * C + cj[None, :]).to(tl.float32)
        product = tl.dot(left, right, product, input_precision="tf32")  # w is exact in tf32
        shift += tl.sum((tl.load(back + n) * tl.load(sum_g + n))[:, None] * right, 0)
    stored = product.to(q.dtype.element_ty)
    tl.store(q + ci[:, None] * C + cj[None, :], stored)
    # The mean of y is taken off with Q as it is stored: what rounding did to Q meets y - mean alone.
    shift = tl.where(i == 0, shift, 0.0)
    shift += tl.sum(tl.load(sums + ci)[:, None] * (stored.to(tl.float32) / b_unit), 0)
    tl.store(part + i * C + cj, -shift / M)
    if (i == 0) & (j == 0):
        tl.store(units, 1.0 / a_unit)
        tl.store(units + 1, a_unit / b_unit)
    if is_last(counters + j, C // BC):
        total = tl.zeros([BC], tl.float32)
        for k in range(C // BC):
            total += tl.load(part + k * C + cj, cache_modifier=".cg")
        tl.store(constant + cj, total)


@triton.jit
def _input_gradient_kernel(
    g,
    y,
    aw,
    q,
    constant,
    units,
    dy,
    M,
    N: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dy = g @ (a w) + y @ Q + constant."""
    column, tile = tl.program_id(0), tl.program_id(1)
    c = column * BC + tl.arange(0, BC)
    r = tl.arange(0, BM)
    first = (tile * BM).to(tl.int64)
    inside = (r < M - tile * BM)[:, None]
    g += first * N
    y += first * C
    product = tl.zeros([BM, BC], tl.float32)
    DEPTH: tl.constexpr = min(BK, C)
    for j in tl.range(0, C, DEPTH, num_stages=STAGES):
        k = j + tl.arange(0, DEPTH)
        left = tl.load(y + r[:, None] * C + k[None, :], mask=inside, other=0.0)
        product = tl.dot(left, tl.load(q + k[:, None] * C + c[None, :]), product)
    product *= tl.load(units + 1)
    for j in tl.range(0, N, BK, num_stages=STAGES):
        k = j + tl.arange(0, BK)
        left = tl.load(g + r[:, None] * N + k[None, :], mask=inside, other=0.0)
        product = tl.dot(left, tl.load(aw + k[:, None] * C + c[None, :]), product)
    result = product * tl.load(units) + tl.load(constant + c)[None, :]
    tl.store(dy + first * C + r[:, None] * C + c[None, :], result.to(dy.dtype.element_ty), mask=inside)


# --- what the models call ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Sums over the rows of y: what `product_statistics` needs of it."""

    about: Tensor  # fp32 [c + 2, c]: (y - centre).T @ (y - centre), the sum of y - centre, the centre
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductNorm:
    """The norm of z = y @ w.T: what normalising z and `product_backward` need."""

    coef: Tensor  # fp32 [4, n], as of `kernels.norm.statistics`
    centred: Tensor  # fp32 [n, c]: w @ G'
    sums: Tensor  # fp32 [c]: s
    rows: int  # m


def _gram_tiling(m: int, c: int) -> tuple[Tiling, int]:
    """How rows are dealt out, and the stages of the loop over them."""
    return Tiling.of(m, c, elements=4096, warps=8, widest=128, programs=2 * processors() * (c // min(128, c))), 3


def _outer_tiling(m: int, n: int, c: int) -> tuple[int, Tiling, int]:
    """Columns of g and, by a tiling of y's, rows and columns of y in a program's tile; stages."""
    across, columns = min(256, n), min(128, c)
    programs = max(1, processors() * columns // c * across // n)
    return across, Tiling.of(m, columns, elements=64 * columns, warps=8, widest=columns, programs=programs), 3


def _input_tiling(n: int, c: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a tile of dy; warps, stages."""
    return 128, min(128, c), min(64, n), 4 if c <= 64 else 8, 3


def _moments(x: Tensor, coef: Tensor | None) -> tuple[Tensor, Moments]:
    m, c = matrix(x)
    if c & (c - 1) or c < 16:
        raise ValueError(f"the Gram matrix of y is made for 16, 32, 64, ... channels, not for {c}")
    tiling, stages = _gram_tiling(m, c)
    y = x if coef is None else torch.empty_like(x)
    part = torch.empty(tiling.programs, c + 1, c, device=x.device, dtype=torch.float32)
    about = torch.empty(c + 2, c, device=x.device, dtype=torch.float32)
    _gram_kernel[((c // tiling.columns) ** 2, tiling.programs)](
        x,
        about if coef is None else coef,
        y,
        part,
        about,
        m,
        tiling.rows_per_program,
        C=c,
        NORM=coef is not None,
        BM=tiling.rows,
        BC=tiling.columns,
        STAGES=stages,
        num_warps=tiling.warps,
    )
    _sum_kernel[(c + 1,)](part, about, tiling.programs, C=c, BC=tiling.columns, num_warps=4)
    return y, Moments(about=about, rows=m)


def normalise_with_gram(x: Tensor, coef: Tensor) -> tuple[Tensor, Moments]:
    """y = relu(norm(x)) and its moments, in one pass over x."""
    return _moments(x, coef)


def gram(y: Tensor) -> Moments:
    """The moments of a y that is there already: one more read of it."""
    return _moments(y, None)[1]


def product_statistics(
    y: Tensor | Moments, w: Tensor, norm: nn.BatchNorm2d, counters: Tensor, *, local: bool = False
) -> ProductNorm:
    """The norm of z = y @ w.T from y or its moments; updates the running statistics (not the count of batches).

    w: [n, c] or [n, c, 1, 1], both powers of two from 16 on. local: coef holds mean and variance alone, for ranks that
    share their statistics; what such ranks do with them is theirs, product_backward knows no group.
    """
    moments = y if isinstance(y, Moments) else gram(y)
    n, c = w.shape[:2]
    if n & (n - 1) or n < 16:
        raise ValueError(f"the norm of a product is made for 16, 32, 64, ... channels, not for {n}")
    rows, columns = max(16, n // COLUMN_BLOCKS), 16
    coef = new_coef(norm)
    centred = torch.empty(n, c, device=w.device, dtype=torch.float32)
    sums = torch.empty(c, device=w.device, dtype=torch.float32)
    squares = torch.empty(c // columns, n, device=w.device, dtype=torch.float32)
    part = torch.empty(2, n, device=w.device, dtype=torch.float32)
    _statistics_kernel[(c // columns, n // rows)](
        moments.about,
        w,
        centred,
        sums,
        squares,
        part,
        counters,
        coef,
        norm.weight,
        norm.bias,
        norm.running_mean,
        norm.running_var,
        moments.rows,
        norm.momentum,
        norm.eps,
        N=n,
        C=c,
        LOCAL=local,
        BN=rows,
        BC=columns,
        BK=min(64, c),
        num_warps=4,
    )
    return ProductNorm(coef=coef, centred=centred, sums=sums, rows=moments.rows)


def product_backward(
    g: Tensor,
    y: Tensor,
    w: Tensor,
    kept: ProductNorm,
    sum_g: Tensor,
    grads: NormGradients,
    dw: Tensor,
    counters: Tensor,
) -> Tensor:
    """dy of norm(y @ w.T) from g, the gradient of the norm's output; fills dw and grads.

    sum_g: fp32 sums of g's columns (may be grads.bias itself). Statistics shared by a group of ranks need sums over the
    group between the two passes over g: there `kernels.norm` is the way.
    """
    if grads.local:
        raise ValueError("product_backward knows no group of ranks: use reduce_gradient and apply_gradient there")
    (m, c), n = matrix(y), w.shape[0]
    across, tiling, stages = _outer_tiling(m, n, c)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=y.device, dtype=dtype)

    part, aw, q = scratch(tiling.programs, n, c), scratch(n, c, dtype=y.dtype), scratch(c, c, dtype=y.dtype)
    _outer_kernel[((n // across) * (c // tiling.columns), tiling.programs)](
        g,
        y,
        part,
        m,
        tiling.rows_per_program,
        N=n,
        C=c,
        BM=tiling.rows,
        BN=across,
        BC=tiling.columns,
        STAGES=stages,
        num_warps=tiling.warps,
    )
    rows = max(1, 256 // c)
    _weight_gradient_kernel[(n // rows,)](
        part,
        tiling.programs,
        kept.centred,
        kept.sums,
        w,
        kept.coef,
        sum_g,
        grads.back,
        grads.weight,
        grads.bias,
        dw,
        aw,
        m,
        N=n,
        C=c,
        BN=rows,
        num_warps=4,
    )
    side = min(32, c)
    constant, units, shifts = scratch(c), scratch(2), scratch(c // side, c)
    _quadratic_kernel[(c // side, c // side)](
        w, sum_g, kept.sums, grads.back, q, constant, units, shifts, counters, m, N=n, C=c, BC=side, BK=min(64, n)
    )
    dy, (rows, columns, depth, warps, stages) = torch.empty_like(y), _input_tiling(n, c)
    _input_gradient_kernel[(c // columns, triton.cdiv(m, rows))](
        g, y, aw, q, constant, units, dy, m, N=n, C=c, BM=rows, BC=columns, BK=depth, STAGES=stages, num_warps=warps
    )
    return dy
