"""Batch norm after a 1x1 convolution without reading the convolution's output: its moments are those of the input.

z = y @ w.T is the widest tensor of a residual block: y [m, c] (rows of a channels-last tensor), w [n, c], n = 4 c. All
that its batch norm needs follows from sums over rows that are as small as w. y' and z' are y and z about their means.

    forward    s = sum of y's rows, G' = y'.T @ y'    taken while y = relu(norm(x)) is made: no pass of their own
               mean of z = w @ s / m,  variance of z = diagonal of w @ G' @ w.T / m
    backward   given g, the gradient of norm(z), and the sums of its columns (a, b: dz = a * g + b * z' - a * mean of g)
               P' = g.T @ y' = g.T @ y - (sum of g) s.T / m
               sum of g * z' = row sums of w * P'     -> a, b, gradients of the norm's weight and bias
               dw = dz.T @ y = a P' + b (w @ G')
               dy = dz @ w   = g @ (a w) + y @ Q + constant,   Q = w.T @ diag(b) @ w

    normalise_with_gram   x -> y, s, G                             1 read, 1 write of c columns; 2 each beyond 128
    product_statistics    coef, running statistics, w @ G'         small
    product_backward      P                                        1 read of n + c columns
                          dw, a w, back; Q, constant               small
                          dy                                       1 read of n + c columns, 1 write of c

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hyperbatch.kernels.compile import kernel
from hyperbatch.kernels.norm import NormGradients, new_coef
from hyperbatch.kernels.rows import Tiling, beside, matrix, overlaps, processors, reducing
from hyperbatch.kernels.sums import add_partials, finish_statistics, is_last, store_gradients, store_partials

WIDEST = 128  # channels whose Gram matrix one program can hold in registers
ROW_BLOCKS = 64  # of w at most: each takes a counter
FAR = tl.constexpr(16.0)  # squared mean over variance from which a column is taken about a centre


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _rows(x, r, inside, c, scale, shift, C: tl.constexpr, NORM: tl.constexpr):
    """Rows of y: those of x, or relu(norm(x)) rounded as it is stored."""
    v = tl.load(x + r[:, None] * C + c[None, :], mask=inside, other=0.0)
    if NORM:
        v = v.to(tl.float32) * scale[None, :] + shift[None, :]
        v = tl.where(v < 0, 0.0, v).to(x.dtype.element_ty)  # a nan stays one, as in torch
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


@kernel
def _gram_kernel(
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
    NORM: tl.constexpr,  # y = relu(norm(x)) is made and stored; else x is y
    BM: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Partials of G and s for all columns at once. Where they are too many for one program: of s alone, and y about its
    centre is stored in `apart`, for a matrix product to make G of it."""
    GRAM: tl.constexpr = BC == C
    column, p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c = column * BC + tl.arange(0, BC)
    if OVERLAP:
        gdc_wait()
    scale, shift = tl.load(coef + 2 * C + c), tl.load(coef + 3 * C + c)
    centre = _centre(x, coef, scale, shift, c, M, C, NORM, BM)
    if p == 0:
        tl.store(moments + (C + 1) * C + c, centre.to(tl.float32))
    if GRAM:
        gram = tl.zeros([BC, BC], tl.float32)
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
        if GRAM:
            gram = tl.dot(tl.trans(v), v, gram)
        else:
            tl.store(apart + r[:, None] * C + c[None, :], v, mask=inside)
    if OVERLAP:
        gdc_launch_dependents()
    total = tl.sum(total, 0)
    if GRAM:
        part += p * (C + 1) * C
        tl.store(part + c[:, None] * C + c[None, :], gram)
        tl.store(part + C * C + c, total)
    else:
        tl.store(part + p * C + c, total)
        if is_last(counters + column, programs):
            tl.store(moments + C * C + c, add_partials(part, programs, c, C))


@kernel
def _sum_kernel(part, moments, programs, C: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr):
    """Some columns of one row of G, or of s, of all programs."""
    if OVERLAP:
        gdc_wait()
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.program_id(0) * C
    tl.store(moments + row + c, add_partials(part + row, programs, c, (C + 1) * C))


@kernel
def _product_statistics_kernel(
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
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
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
        # As good as fp32: w is exact in tf32, and two parts of G' hold 22 bits.
        product = tl.dot(left, right, product, input_precision="tf32x3")
        mean += tl.sum(left * (tl.load(moments + (C + 1) * C + k) + apart)[None, :], 1)
    tl.store(centred + n[:, None] * C + c[None, :], product)
    own = tl.load(w + n[:, None] * C + c[None, :]).to(tl.float32)
    tl.store(squares + column * N + n, tl.sum(own * product, 1))
    if row == 0:
        tl.store(sums + c, total + M * tl.load(moments + (C + 1) * C + c))
    if is_last(counters + row, tl.num_programs(0)):
        block = tl.arange(0, C // BC)
        of_blocks = tl.load(squares + block[:, None] * N + n[None, :], cache_modifier=".cg")
        store_partials(part, 0, 1, N, n, mean, tl.sum(of_blocks, 0))
        tl.debug_barrier()  # stored by some threads, read by others
        finish_statistics(part, coef, weight, bias, running_mean, running_var, n, M, N, M, 1, momentum, eps, LOCAL)


@triton.jit
def _largest_to_one(values, N: tl.constexpr):
    """The power of two that brings the largest of |values| into [1, 2)."""
    largest = tl.max(tl.abs(tl.load(values + tl.arange(0, N))), 0)
    return tl.exp2(-tl.floor(tl.log2(tl.minimum(tl.maximum(largest, 2.0**-100), 2.0**100))))


@kernel
def _weight_gradient_kernel(
    outer,
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
    units,
    M,
    N: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some rows of P -> back and the gradients of the norm, dw, and a * w for the gradient of y."""
    if OVERLAP:
        gdc_launch_dependents()
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, C)
    at = n[:, None] * C + c[None, :]
    g = tl.load(sum_g + n)
    about_mean = tl.load(outer + at) - (g / M)[:, None] * tl.load(sums + c)[None, :]
    own = tl.load(w + at).to(tl.float32)
    sum_gz = tl.sum(own * about_mean, 1)
    store_gradients(g, sum_gz, coef, back, dweight, dbias, n, M, N, False)
    rstd, a = tl.load(coef + N + n), tl.load(coef + 2 * N + n)
    b = -a * rstd * rstd * sum_gz / M
    tl.store(dw + at, (a[:, None] * about_mean + b[:, None] * tl.load(centred + at)).to(dw.dtype.element_ty))
    # The norm's weight may be tiny, as after a start from 0: scaled, a * w stays a normal number of 16 bits.
    unit = _largest_to_one(coef + 2 * N, N)
    if tl.program_id(0) == 0:
        tl.store(units, unit)
    tl.store(aw + at, (own * (a * unit)[:, None]).to(aw.dtype.element_ty))


@kernel
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
    OVERLAP: tl.constexpr,
):
    """Q = w.T @ diag(b) @ w in 16 bits, and the constant of dy.

    b is a mean of g * z' and can be far below g: unscaled, Q would fall among the subnormal numbers of fp16.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    i, j = tl.program_id(0), tl.program_id(1)
    ci, cj = i * BC + tl.arange(0, BC), j * BC + tl.arange(0, BC)
    unit = _largest_to_one(back + N, N)
    product = tl.zeros([BC, BC], tl.float32)
    shift = tl.zeros([BC], tl.float32)
    for k in range(0, N, BK):
        n = k + tl.arange(0, BK)
        left = tl.load(w + n[:, None] * C + ci[None, :])
        left = (left.to(tl.float32) * (tl.load(back + N + n) * unit)[:, None]).to(left.dtype)
        right = tl.load(w + n[:, None] * C + cj[None, :])
        product = tl.dot(tl.trans(left), right, product)
        shift += tl.sum((tl.load(back + n) * tl.load(sum_g + n))[:, None] * right.to(tl.float32), 0)
    stored = product.to(q.dtype.element_ty)
    tl.store(q + ci[:, None] * C + cj[None, :], stored)
    # The mean of y is taken off with Q as it is stored: what rounding did to Q meets y - mean alone.
    shift = tl.where(i == 0, shift, 0.0)
    shift += tl.sum(tl.load(sums + ci)[:, None] * stored.to(tl.float32), 0) / unit
    tl.store(part + i * C + cj, -shift / M)
    if (i == 0) & (j == 0):
        tl.store(units + 1, unit)
    if is_last(counters + j, C // BC):
        block = tl.arange(0, C // BC)
        of_blocks = tl.load(part + block[:, None] * C + cj[None, :], cache_modifier=".cg")
        tl.store(constant + cj, tl.sum(of_blocks, 0))


@kernel
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
    OVERLAP: tl.constexpr,
):
    """dy = g @ (a w) + y @ Q + constant."""
    tile = tl.program_id(0) // (C // BC)
    c = tl.program_id(0) % (C // BC) * BC + tl.arange(0, BC)
    r = tl.arange(0, BM)
    first = (tile * BM).to(tl.int64)
    inside = (r < M - tile * BM)[:, None]
    g += first * N
    y += first * C
    if OVERLAP:
        gdc_wait()
    product = tl.zeros([BM, BC], tl.float32)
    DEPTH: tl.constexpr = min(BK, C)
    for j in tl.range(0, C, DEPTH, num_stages=STAGES):
        k = j + tl.arange(0, DEPTH)
        left = tl.load(y + r[:, None] * C + k[None, :], mask=inside, other=0.0)
        product = tl.dot(left, tl.load(q + k[:, None] * C + c[None, :]), product)
    a_unit = tl.load(units)
    product *= a_unit / tl.load(units + 1)
    for j in tl.range(0, N, BK, num_stages=STAGES):
        k = j + tl.arange(0, BK)
        left = tl.load(g + r[:, None] * N + k[None, :], mask=inside, other=0.0)
        product = tl.dot(left, tl.load(aw + k[:, None] * C + c[None, :]), product)
    result = product / a_unit + tl.load(constant + c)[None, :]
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
    if c > WIDEST:
        return reducing(m, c, warps=8, per_processor=4), 1
    return Tiling.of(m, c, elements=8192, warps=8, widest=c, programs=processors()), 4


def _input_tiling(n: int, c: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a tile of dy; warps, stages."""
    warps, stages = (4, 2) if c <= 64 else (8, 3)
    return 128, min(256, c), min(64, n), warps, stages


def _as_rows(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _outer(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a.T @ b of rows of 16 bits, into fp32: cuBLAS reads them as fast as the memory gives them."""
    a, b = _as_rows(a), _as_rows(b)
    if out.is_cuda:
        torch.mm(a.t(), b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a.t().float(), b.float(), out=out)


def _moments(x: Tensor, coef: Tensor | None, counters: Tensor) -> tuple[Tensor, Moments]:
    m, c = matrix(x)
    if c & (c - 1) or c < 16:
        raise ValueError(f"the Gram matrix of y is made for 16, 32, 64, ... channels, not for {c}")
    tiling, stages = _gram_tiling(m, c)
    in_one_pass = tiling.columns == c
    y = x if coef is None else torch.empty_like(x)
    apart = y if in_one_pass else torch.empty_like(x)
    part = torch.empty(tiling.programs, c + 1 if in_one_pass else 1, c, device=x.device, dtype=torch.float32)
    about = torch.empty(c + 2, c, device=x.device, dtype=torch.float32)
    _gram_kernel[(c // tiling.columns, tiling.programs)](
        x,
        about if coef is None else coef,
        y,
        apart,
        part,
        counters,
        about,
        m,
        tiling.rows_per_program,
        C=c,
        NORM=coef is not None,
        BM=tiling.rows,
        BC=tiling.columns,
        STAGES=stages,
        num_warps=tiling.warps,
        **beside(),
    )
    if in_one_pass:
        width = min(c, 32)
        _sum_kernel[(c + 1, c // width)](part, about, tiling.programs, C=c, BC=width, num_warps=4, **beside())
    else:
        _outer(apart, apart, about[:c])
    return y, Moments(about=about, rows=m)


def normalise_with_gram(x: Tensor, coef: Tensor, counters: Tensor) -> tuple[Tensor, Moments]:
    """y = relu(norm(x)) and its moments, in one pass over x up to 128 channels."""
    return _moments(x, coef, counters)


def gram(y: Tensor, counters: Tensor) -> Moments:
    """The moments of a y that is there already."""
    return _moments(y, None, counters)[1]


def product_statistics(
    y: Tensor | Moments, w: Tensor, norm: nn.BatchNorm2d, counters: Tensor, *, local: bool = False
) -> ProductNorm:
    """The norm of z = y @ w.T from y or its moments; updates the running statistics (not the count of batches).

    w: [n, c] or [n, c, 1, 1], both powers of two from 16 on. local: coef holds mean and variance alone, for ranks that
    share their statistics; what such ranks do with them is theirs, product_backward knows no group.
    """
    moments = y if isinstance(y, Moments) else gram(y, counters)
    n, c = w.shape[:2]
    if n & (n - 1) or n < 16:
        raise ValueError(f"the norm of a product is made for 16, 32, 64, ... channels, not for {n}")
    rows = max(16, n // ROW_BLOCKS, 32 if n >= 1024 else 16)
    columns, depth = (16, c) if c <= 64 else (32, 128) if c == 128 else (32, 64)
    coef = new_coef(norm)
    centred = torch.empty(n, c, device=w.device, dtype=torch.float32)
    sums = torch.empty(c, device=w.device, dtype=torch.float32)
    squares = torch.empty(c // columns, n, device=w.device, dtype=torch.float32)
    part = torch.empty(2, n, device=w.device, dtype=torch.float32)
    _product_statistics_kernel[(c // columns, n // rows)](
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
        BK=depth,
        OVERLAP=overlaps(),
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

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=y.device, dtype=dtype)

    outer, aw, q, units = scratch(n, c), scratch(n, c, dtype=y.dtype), scratch(c, c, dtype=y.dtype), scratch(2)
    _outer(g, y, outer)
    rows = max(1, min(n, 512 // c))
    _weight_gradient_kernel[(n // rows,)](
        outer,
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
        units,
        m,
        N=n,
        C=c,
        BN=rows,
        OVERLAP=overlaps(),
        num_warps=4,
    )
    side = 16
    constant, shifts = scratch(c), scratch(c // side, c)
    _quadratic_kernel[(c // side, c // side)](
        w,
        sum_g,
        kept.sums,
        grads.back,
        q,
        constant,
        units,
        shifts,
        counters,
        m,
        N=n,
        C=c,
        BC=side,
        BK=min(256, n),
        **beside(),
    )
    dy, (rows, columns, depth, warps, stages) = torch.empty_like(y), _input_tiling(n, c)
    _input_gradient_kernel[(c // columns * triton.cdiv(m, rows),)](
        g,
        y,
        aw,
        q,
        constant,
        units,
        dy,
        m,
        N=n,
        C=c,
        BM=rows,
        BC=columns,
        BK=depth,
        STAGES=stages,
        num_warps=warps,
        **beside(),
    )
    return dy
